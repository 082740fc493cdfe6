"""Places of pre-scales: a norm, or the matrix before.

A spelling may store them beside the weights. One that does not needs a place for each; where none is exact, planning
says so. What stands between two modules comes from the structure's roles, never from their names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from bridge.core.text import pattern
from bridge.core.values import Feed, Format, InputGroup
from bridge.planning.joined_and_cut import MIN_GROUP
from bridge.planning.plan import PASSTHROUGH
from bridge.planning.target import Draft
from bridge.targets.hf.spelling import Traits

INTO = "pre-scales are not stored: {count} norms and the rows of {feeds} matrices are multiplied by them"
HEADS = (
    "{what} of the pre-scales of {repeat} query heads that read the same rows of {writer} is used for all of them: the "
    "function of the model stays, the scales are less its own"
)


@dataclass(frozen=True)
class Folding:
    """The places of the pre-scales of one draft."""

    draft: Draft
    traits: Traits

    @cached_property
    def groups(self) -> tuple[InputGroup, ...]:
        """Groups reduced to their quantized members, if two or more are left; any that may fold, if all must."""
        formats = self.draft.quantized
        readings = Counter(module for group in self._readings for module in dict.fromkeys(group.modules))
        groups = []
        for group in self._readings:
            members = tuple(dict.fromkeys(module for module in group.modules if module in formats))
            if len(members) >= (MIN_GROUP if self.traits.prescales else 1):
                # an unquantized member reads the plain norm; a module that runs twice has only one pre_quant_scale
                alone = group.alone and all(m in members and readings[m] == 1 for m in group.modules)
                groups.append(replace(group, modules=members, alone=alone))
        return tuple(groups)

    @cached_property
    def norms(self) -> dict[str, InputGroup]:
        """Norm -> the group whose pre_quant_scale it takes; nothing else reads it, and no second group has it.

        ModelOpt leaves SmoothQuant's beside the weights.
        """
        formats = self.draft.quantized
        readers = [group.norm for group in self._readings]
        written = {spec.name for spec, _ in self.draft.copied()}
        takes = {}
        for group in self.groups:
            own = {formats[module] for module in group.modules}
            folds = len(own) == 1 and all(self._folds(format_) for format_ in own)
            weighted = f"{group.norm}.weight" in written  # a norm may have no weight
            if group.norm and weighted and group.alone and folds and readers.count(group.norm) == 1:
                takes[group.norm] = group
        return takes

    @cached_property
    def feeds(self) -> dict[str, Feed]:
        """Reader -> the pair whose writer takes its pre-scale, with the reader's format."""
        in_norm = {module for group in self.norms.values() for module in group.modules}
        formats = self.draft.quantized
        known = {
            feed.reader: replace(feed, format=formats[feed.reader])
            for feed in self.draft.structure.feeds
            if feed.reader in formats and formats[feed.reader].prescales and feed.reader not in in_norm
        }
        return {reader: feed for reader, feed in known.items() if not self.traits.prescales or self._is_fused(feed)}

    def feeds_at(self, module: str) -> tuple[Feed, ...]:
        """The pairs of which a module is one."""
        return self._by_module.get(module, ())

    def problems(self) -> Iterator[tuple[str, str]]:
        """Modules whose pre-scale has no place, each with the lines of a recipe that does without it."""
        scheme = self.draft.scheme
        if self.traits.prescales or scheme is None or scheme.name == PASSTHROUGH:
            return
        in_norm = {module for group in self.norms.values() for module in group.modules}
        for module, format_ in self.draft.quantized.items():
            if format_.prescales and module not in in_norm and module not in self.feeds:
                yield module, f"{self._why(module, format_)}. {_remedy(module, format_)}"

    def notes(self) -> Iterator[str]:
        """Sentences on what was multiplied into what."""
        if self.traits.prescales or not (self.norms or self.feeds):
            return
        yield INTO.format(count=len(self.norms), feeds=len(self.feeds))
        shared = {(pattern(feed.writer), feed.repeat, _what(feed)) for feed in self.feeds.values() if feed.repeat > 1}
        for writer, repeat, what in sorted(shared):
            yield HEADS.format(what=what, repeat=repeat, writer=writer)

    @property
    def _readings(self) -> tuple[InputGroup, ...]:
        structure = self.draft.structure
        return structure.groups if self.traits.prescales else (*structure.groups, *structure.singles)

    def _is_fused(self, feed: Feed) -> bool:
        """Whether ModelOpt does not store a pre-scale that it could store."""
        assert feed.format
        fp4 = feed.format.weight[0].dtype == "float4_e2m1fn"
        return fp4 and feed.repeat == 1 and self.draft.structure.architecture.startswith(self.traits.fuses)

    def _folds(self, format_: Format) -> bool:
        return format_.algorithm in ("awq", "awq_full") if self.traits.prescales else format_.prescales

    def _why(self, module: str, format_: Format) -> str:
        what = f"no place for its pre-scales ({format_.algorithm}), which this format does not store"
        if self.draft.structure.traced:
            return f"{what}: this architecture has no table that says which matrix makes its input"
        if any(module in group.modules and group.norm for group in self.groups):
            return f"{what}: other modules, or modules in another format, read the same norm"
        return f"{what}: an activation, a sum or an unknown step stands between it and the matrix before"

    @cached_property
    def _by_module(self) -> Mapping[str, tuple[Feed, ...]]:
        by: dict[str, tuple[Feed, ...]] = {}
        for feed in self.feeds.values():
            for module in (feed.writer, feed.reader):
                by[module] = (*by.get(module, ()), feed)
        return by


def _what(feed: Feed) -> str:
    static = feed.format is not None and feed.format.input is not None and feed.format.input.static
    return "the least" if static else "the mean"


def _remedy(module: str, format_: Format) -> str:
    """The lines of a recipe; the modules of all layers have the same ones."""
    glob = json.dumps([f"*.{'.'.join(module.split('.')[-2:])}"])
    plain = "int4_wo" if format_.weight[0].dtype == "int4" else "int8_wo"
    return f"A recipe can do without: [[rule]], modules = {glob}, quant = \"{plain}\"; or use format='modelopt'"
