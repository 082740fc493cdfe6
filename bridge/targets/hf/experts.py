"""Place the experts that one tensor of the source holds.

They stay in it, become modules of each, or stay unquantized with a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from bridge.core.text import fold_problems
from bridge.core.values import Format, Site, TensorSpec
from bridge.planning.passthrough import REMEDY
from bridge.planning.plan import PASSTHROUGH, STACKED
from bridge.planning.target import Draft
from bridge.targets.hf.spelling import Spelling
from bridge.targets.stacks import PAIRS, Matrix, container, modules_of

AS_IT_IS = "stays unquantized: {why}"
NO_NAMES = "no program is known to read these experts quantized"
TOGETHER = "programs read these experts from one tensor only, for which ModelOpt has fp8, nvfp4 and nvfp4_wo"
ELSEWHERE = "; format='compressed-tensors' (--format compressed-tensors) has other schemes, a module an expert"


class Experts:
    """The stacks of a draft: in one tensor as the spelling has them, as modules of each expert, or unquantized.

    `stacks`: weight -> the modules that it becomes. `draft`: the draft, in which stacks that no module is made of are
    unquantized.
    """

    def __init__(self, draft: Draft, spelling: Spelling) -> None:
        self._given, self._spelling = draft, spelling
        self.stacks: dict[str, list[Matrix]] = {}
        self.problems: list[tuple[str, str]] = []
        self._kept: dict[str, tuple[str, str]] = {}  # weight -> module, reason
        for spec, site, format_ in self._stacked():
            if isinstance(format_, Format):
                self._place(spec, site, format_)
            elif site.keep and format_ == site.keep:
                self._kept[spec.name] = site.module, format_

    @property
    def draft(self) -> Draft:
        kept = {weight: why for weight, (_, why) in self._kept.items()}
        return replace(self._given, formats={**self._given.formats, **kept})

    @property
    def formats(self) -> dict[str, Format]:
        """Module -> its format."""
        known = self._given.quantized
        return {m.site.module: known[m.slice.module] for matrices in self.stacks.values() for m in matrices}

    @property
    def notes(self) -> list[str]:
        kept = (self._kept[name] for name in self._given.structure.order if name in self._kept)
        return fold_problems([(module, AS_IT_IS.format(why=why)) for module, why in kept])

    def of_layer(self, weight: str) -> list[Matrix]:
        """All matrices of the experts of a layer, expert by expert, if `weight` is its first stack; else none."""
        stacks = self._layers[container(weight)[0]]
        if weight != stacks[0]:
            return []
        return sorted((m for name in stacks for m in self.stacks[name]), key=lambda m: m.site.expert or 0)

    @cached_property
    def _layers(self) -> dict[str, list[str]]:
        layers: dict[str, list[str]] = {}
        for weight in (name for name in self._given.structure.order if name in self.stacks):
            layers.setdefault(container(weight)[0], []).append(weight)
        return layers

    def _stacked(self) -> Iterator[tuple[TensorSpec, Site, Format | str | None]]:
        for spec, site in self._given.copied():
            if site and site.stacked:
                yield spec, site, self._given.formats.get(site.weight)

    def _place(self, spec: TensorSpec, site: Site, format_: Format) -> None:
        together = self._given.structure.architecture.startswith(self._spelling.TRAITS.stacks)
        if together and self._spelling.holds_stack(format_):
            return
        if self._given.scheme and self._given.scheme.name == PASSTHROUGH:
            self.problems.append((site.module, f"{STACKED} in this format; {REMEDY}"))
            return
        joined = self._given.structure.joined.get(spec.name, "")
        if PAIRS in self._given.structure.joined.values():  # vLLM's gpt_oss.py passes over a module an expert
            self._kept[spec.name] = site.module, TOGETHER
        elif together:
            self._kept[spec.name] = site.module, TOGETHER + ELSEWHERE
        elif matrices := modules_of(spec, site, joined):
            self.stacks[spec.name] = matrices
        else:
            self._kept[spec.name] = site.module, NO_NAMES
