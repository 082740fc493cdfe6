"""The sizes of each dim that a search tries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from bridge.core.errors import PlanError, UsageError
from bridge.core.text import nearest
from bridge.sources.pruned.opening import Cut

Keep = Mapping[str, int]
Ladder = tuple[Keep, ...]  # the whole size, {}, and smaller ones of a dim, or of dims that change together
RUNGS = 8  # sizes of a dim besides the whole one
WIDTHS = (64, 32, 16, 8)  # multiples for widths; the first of which a width has at least eight
WIDE = ("ffn", "moe_ffn", "shared_ffn", "hidden")


def ladders_of(whole: Cut, dims: Sequence[str] | None, fits: Callable[[Keep], bool]) -> tuple[Ladder, ...]:
    """The ladders of `dims`, None for all that the model has; `fits` says what may be written.

    Query heads and their groups are one ladder. So are the hidden width and the heads of a model whose config has no
    width of a head of its own.
    """
    # with other tokens a loss is another figure
    known = [dim for dim in whole.matched.table.roles.prune if dim in whole.before and dim != "vocab"]
    for dim in dims or ():
        if dim not in known:
            raise UsageError(f"dims: this model has no dim {dim!r}; {nearest(dim, known)}")
    asked = [dim for dim in known if dims is None or dim in dims]
    found: list[Ladder] = []
    for dim in asked:
        if dim == "kv_heads" and "heads" in asked:
            continue  # with its heads
        rungs = [keep for keep in _sizes(whole, dim, asked) if fits(keep)]
        if not rungs and dim == "hidden" and "heads" in asked:
            rungs = [keep for keep in _with_heads(whole) if fits(keep)]
        if rungs:
            found.append(({}, *_thin(rungs)))
    if not found:
        raise PlanError(f"{whole.source.where}: no smaller size of {', '.join(asked)} fits the model")
    return tuple(found)


def multiple_of(dim: str, size: int) -> int:
    """What sizes of a dim are multiples of."""
    return next((width for width in WIDTHS if size >= 8 * width), 1) if dim in WIDE else 1


def largest_of(whole: Cut, ladders: Sequence[Ladder]) -> dict[str, int]:
    """The largest size that a search may try of each dim: a rung, or of a width the first multiple below the whole."""
    found: dict[str, int] = {}
    for keep in (keep for ladder in ladders for keep in ladder):
        for dim, size in keep.items():
            unit, before = multiple_of(dim, whole.before[dim]), whole.before[dim]
            found[dim] = max(size, found.get(dim, 0), (before - 1) // unit * unit if dim in WIDE else 0)
    return found


def _sizes(whole: Cut, dim: str, asked: Sequence[str]) -> Iterator[Keep]:
    """Smaller sizes of a dim, the largest first."""
    size = whole.before[dim]
    groups = whole.before.get("kv_heads", size)
    if dim in ("heads", "kv_heads") and groups != whole.before["heads"]:
        yield from _heads(whole.before["heads"], groups, asked)
        return
    unit = multiple_of(dim, size)
    yield from ({dim: fewer} for fewer in range((size - 1) // unit * unit, 0, -unit))


def _heads(heads: int, groups: int, asked: Sequence[str]) -> Iterator[Keep]:
    """Fewer heads in each group, then fewer groups, with all or half of their heads."""
    each = heads // groups
    if "heads" in asked:
        yield from ({"heads": groups * fewer} for fewer in range(each - 1, 0, -1))
    if "kv_heads" in asked:
        for fewer in range(groups - 1, 0, -1):
            for inside in (each, each // 2) if "heads" in asked else (each,):
                if inside:
                    yield {"kv_heads": fewer, "heads": fewer * inside}


def _with_heads(whole: Cut) -> Iterator[Keep]:
    """Fewer heads and the hidden width that belongs to them."""
    heads, hidden = whole.before["heads"], whole.before["hidden"]
    for fewer in range(heads - 1, 0, -1):
        if not hidden * fewer % heads:
            yield {"hidden": hidden * fewer // heads, "heads": fewer}


def _thin(rungs: Sequence[Keep]) -> Iterable[Keep]:
    """At most `RUNGS` of them, evenly, the last included."""
    if len(rungs) <= RUNGS:
        return rungs
    return [rungs[(at + 1) * len(rungs) // RUNGS - 1] for at in range(RUNGS)]
