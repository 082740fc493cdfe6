"""Plan a pruned model, and resolve the sizes that users give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bridge.core.errors import PlanError
from bridge.core.output.names import PRUNING
from bridge.core.text import fold_layers, nearest, number
from bridge.sources.pruned.choose import Scores, choose
from bridge.sources.pruned.config import pruned_config
from bridge.sources.pruned.kept import Repaired, load_kept
from bridge.sources.pruned.renumber import renumbered_config
from bridge.sources.pruned.source import PrunedSource
from bridge.sources.pruned.sparse import IN, OUT, Sparse, sparse_axes
from bridge.sources.pruned.vocabulary import Vocabulary, open_vocabulary
from bridge.sources.source import Source
from bridge.tables.architectures.arch import ArchTable
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.meaning import not_followed
from bridge.tables.architectures.structure import match_table

_MULTIPLE = 64  # of widths that are given in percent: kernels want them
_COUNTS = ("layers", "heads", "kv_heads", "experts")


@dataclass(frozen=True)
class Cut:
    """What a user asked for, with everything checked that headers can tell; no choice is made yet."""

    source: Source
    matched: Matched
    before: Mapping[str, int]
    after: Mapping[str, int]
    dropped: tuple[int, ...]
    vocabulary: Vocabulary | None = None

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims that a run must score, in the order of roles.toml: all but layers with numbers, and tokens."""
        dims = [dim for dim in self.matched.table.roles.prune if self.after.get(dim) != self.before.get(dim)]
        return tuple(dim for dim in dims if dim != "vocab" and (dim != "layers" or not self.dropped))

    def to(self, keep: Mapping[str, Any] | None, drop_layers: Sequence[int] | None = None) -> Cut:
        """The model cut to other sizes, as `plan_cut` checks them."""
        source, matched, before = self.source, self.matched, self.before
        sizes, problems = _sizes_of(matched.table, before, keep or {})
        dropped = tuple(drop_layers or ())
        left, wrong = _layers_left(dropped, before["layers"])
        problems += wrong
        unknown = not_followed(matched.table, matched.architecture, matched.config, matched.table.computes)
        problems += [f"config.json: {text}: it may speak of what would go" for text in unknown]
        if dropped and "layers" in (keep or {}):
            problems.append("layers= and drop_layers= both say which layers go; give one of them")
        if not dropped and not keep:
            problems.append('nothing to cut; give keep={"ffn": "75%"} or drop_layers=[3]')
        if not problems:
            sizes["layers"] = len(left) if dropped else sizes["layers"]
            first = left if dropped else range(sizes["layers"])  # any layers: the widths are the same whichever go
            problems = pruned_config(matched.table, source.config, sizes, list(first))[1]
        vocabulary = None
        if not problems and sizes.get("vocab") != before.get("vocab"):
            vocabulary, problems = _vocabulary(source, before["vocab"], sizes["vocab"])
        if problems:
            raise refused(source, problems)
        return Cut(source, matched, before, sizes, dropped, vocabulary)

    def outline(self) -> PrunedSource:
        """The pruned model for a plan: which parts are kept changes no shape."""
        return self.pruned({dim: {(None, None): np.zeros(count)} for dim, count in self.before.items()})

    def pruned(
        self,
        scores: Scores,
        by_importance: bool = False,
        repaired: Mapping[str, Repaired] = MappingProxyType({}),
        sparse: Sparse | None = None,
    ) -> PrunedSource:
        """The model that is left when the highest scores are kept; PlanError if a dim has none.

        Those of `vocab` are how often tokens are used.
        """
        given: dict[str, float] = {}  # the share of a dim that is not chosen by its scores alone
        if self.dropped:
            left = ~np.isin(np.arange(self.before["layers"]), self.dropped)
            scores = {**scores, "layers": {(None, None): left.astype(float)}}
        if self.vocabulary:
            counts = scores["vocab"][None, None]
            tokens = self.vocabulary.kept(counts, self.after["vocab"])
            scores = {**scores, "vocab": {(None, None): np.isin(np.arange(self.before["vocab"]), tokens).astype(float)}}
            given = {"vocab": float(counts[tokens].sum() / counts.sum())} if counts.any() else {}
        if missing := [dim for dim in self.dims if ("heads" if dim == "kv_heads" else dim) not in scores]:
            raise refused(self.source, [f"no scores of {', '.join(missing)} were given; score them: data= (--data)"])
        kept = choose(self.before, self.after, scores, by_importance)
        own = {"vocab", *(["layers"] if self.dropped else [])}
        kept = replace(kept, share={dim: share for dim, share in kept.share.items() if dim not in own} | given)
        config, problems = pruned_config(self.matched.table, self.source.config, self.after, kept.layers)
        if problems:
            raise refused(self.source, problems)
        return PrunedSource(self.source, self.matched, kept, config, repaired, self.vocabulary, sparse)


def whole_of(source: Source) -> Cut:
    """The model with nothing cut, for `Cut.to` and zeros; PlanError if it is quantized, or no table fits."""
    if source.quantized:
        raise refused(source, ['it is quantized; convert it with quant="none" first, and prune that'])
    matched = match_table(source.config, source.specs)
    if own := ", ".join(matched.table.dims_of_layer):
        why = f"its layers differ in {own} ({matched.table.file.name}), and a cut has one size for all layers"
        raise refused(source, [f"{why}; take a smaller model of the family, or distill into one"])
    before = {dim: count for dim in matched.table.dims if isinstance(count := matched.names[dim], int)}
    return Cut(source, matched, before, before, ())


def plan_cut(source: Source, keep: Mapping[str, Any] | None, drop_layers: Sequence[int] | None) -> Cut:
    """Check what is asked for; PlanError lists all problems. Which layers go is known only with scores or numbers."""
    return whole_of(source).to(keep, drop_layers)


def _sizes_of(table: ArchTable, names: Mapping[str, Any], keep: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the size of every dim of the pruned model, and what is wrong with those asked for."""
    sizes: dict[str, int] = {dim: names[dim] for dim in table.dims}
    problems: list[str] = []
    known = [dim for dim in table.roles.prune if dim in sizes]
    for dim, asked in keep.items():
        if dim not in known:
            what = "this architecture has no" if dim in table.roles.prune else "unknown dim"
            problems.append(f"{what} {dim!r}; {nearest(dim, known)}")
            continue
        size = _size(dim, asked, sizes[dim], sizes.get("kv_heads", 1))
        if not isinstance(size, int):
            problems.append(f"{dim}={asked}: {size}")
        elif not 1 <= size <= sizes[dim]:
            problems.append(f"{dim}={asked}: it is {sizes[dim]} now; give 1 to {sizes[dim]}")
        else:
            sizes[dim] = size
    if not problems:
        problems = _settle_heads(sizes, names, keep)
    if "hidden" in keep and table.scaled and sizes["hidden"] != names["hidden"]:
        why = "the embeddings are scaled by the square root of hidden, which would change"
        problems.append(f"hidden={sizes['hidden']}: {why}; leave hidden out")
    return sizes, problems


def _size(dim: str, asked: Any, before: int, groups: int) -> int | str:
    """The number that is asked for, or what is wrong with it."""
    text = str(asked).strip()
    share = text.endswith("%")
    try:
        number = float(text[:-1]) if share else int(text)
    except ValueError:
        return 'give a whole number, or a share such as "75%"'
    if not share:
        return int(number)
    if not 0 < number <= 100:
        return "a share is above 0% and at most 100%"
    size = int(before * number / 100)
    multiple = groups if dim == "heads" else 1 if dim in _COUNTS else _MULTIPLE
    return size // multiple * multiple or size


def _settle_heads(sizes: dict[str, int], names: Mapping[str, Any], keep: Mapping[str, Any]) -> list[str]:
    """Let query heads and their groups follow each other, and say if they do not fit."""
    if "kv_heads" not in sizes:
        return []
    heads, groups = names["heads"], names["kv_heads"]
    if "kv_heads" in keep and "heads" not in keep:
        sizes["heads"] = heads // groups * sizes["kv_heads"]
    elif heads == groups and "kv_heads" not in keep:
        sizes["kv_heads"] = sizes["heads"]
    if sizes["heads"] % sizes["kv_heads"]:
        fit = sizes["heads"] // sizes["kv_heads"] * sizes["kv_heads"] or sizes["kv_heads"]
        return [f"heads={sizes['heads']} is not a multiple of kv_heads={sizes['kv_heads']}; keep heads={fit}"]
    if sizes["heads"] // sizes["kv_heads"] > heads // groups:
        return [
            f"heads={sizes['heads']}: a group has {heads // groups} heads, so {sizes['kv_heads']} groups have fewer"
        ]
    return []


def _layers_left(dropped: Sequence[int], count: int) -> tuple[list[int], list[str]]:
    """Return the layers that are left when some are dropped, and what is wrong with those."""
    wrong = sorted({layer for layer in dropped if not 0 <= layer < count})
    twice = sorted({layer for layer in dropped if list(dropped).count(layer) > 1})
    problems = [f"there is no layer {layer}; the model has 0 to {count - 1}" for layer in wrong]
    problems += [f"layer {layer} is dropped twice" for layer in twice]
    left = [layer for layer in range(count) if layer not in set(dropped)]
    if not left:
        problems.append("no layer would be left")
    return left, problems


def _vocabulary(source: Source, rows: int, size: int) -> tuple[Vocabulary | None, list[str]]:
    """The tokenizer to cut, and what is wrong with it or with the size."""
    try:
        vocabulary = open_vocabulary(source, rows)
        renumbered_config(vocabulary.settings, lambda number: number)
    except PlanError as error:
        return None, [f"vocab={size}: {error}"]
    least = len(vocabulary.needed)
    if size >= least:
        return vocabulary, []
    what = "special and added tokens, and the bytes or characters that keep every text readable"
    return None, [f"vocab={size}: {least} tokens stay in any case ({what}); give {least} to {rows}"]


def plan_sparse(source: Source, method: str) -> tuple[Cut, Sparse]:
    """Check that a model can have zeros, and choose the matrices that get them; all dims keep their sizes."""
    cut = whole_of(source)
    axes, uneven = sparse_axes(cut.matched, {name: spec.shape for name, spec in source.specs.items()})
    if not axes:
        why = f"no matrix of its layers has rows in a multiple of {OUT} and inputs in one of {IN}"
        raise refused(source, [f"{why}: {', '.join(fold_layers(uneven))}"])
    return cut, Sparse(method, axes)


def pruned_again(source: Source, directory: Path) -> Source:
    """The pruned model that an output was made from, given the whole one; `source` if it was not pruned."""
    if not (directory / PRUNING).is_file() or isinstance(source, PrunedSource):
        return source
    kept, repaired, sparse = load_kept(directory / PRUNING)
    if repaired:
        raise PlanError(
            f"{directory} has {number(len(repaired), 'tensor')} that were solved anew, and {source.where} has the "
            "old ones; give the source that bridge.pruned returns"
        )
    matched = match_table(source.config, source.specs)
    if any(matched.names.get(dim) != size for dim, size in kept.before.items()):
        raise PlanError(f"{directory} was pruned from a model of other sizes than {source.where}")
    config, problems = pruned_config(matched.table, source.config, kept.after, kept.layers)
    if problems:
        raise refused(source, problems)
    vocabulary = open_vocabulary(source, kept.before["vocab"]) if "vocab" in kept.choices else None
    return PrunedSource(source, matched, kept, config, vocabulary=vocabulary, sparse=sparse)


def refused(source: Source, problems: Sequence[str]) -> PlanError:
    """One error for all problems."""
    head = f"{source.where} cannot be pruned so: "
    if len(problems) == 1:
        return PlanError(head + problems[0])
    return PlanError("\n  ".join([f"{head}{number(len(problems), 'problem')}", *problems]))
