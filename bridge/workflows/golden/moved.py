"""What moved, in words: tensors that are alike share a line, layers folded; must never compute what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bridge.errors import fold_layers
from bridge.golden.moves import Measure, Move, Moved
from bridge.golden.values import Statistics
from bridge.show import grouped, pattern

ORDER = ("plan", "file", "missing", "added", "layout", "scales", "codes", "weights", "made", "outputs")
OUTPUTS = 4  # of the places that a run was looked at; the first that moved tells where it began


def told(moved: Moved) -> str:
    """All of it: a head, a line or two for what is alike, notes."""
    of = {(move.file, move.name) for move in moved.moves if move.origin}
    head = f"{moved.after} against {moved.before}: "
    if moved.passed:
        head += f"nothing moved, {moved.tensors:,} tensors"
    else:
        counts = Counter(move.kind for move in moved.moves)
        said = ", ".join(f"{kind} {counts[kind]:,}" for kind in ORDER if counts[kind])
        now = moved.tensors + counts["added"]
        head += f"{len(of):,} of {now:,} tensors moved ({said})"
    return "\n".join([head, *(f"  {line}" for line in lines(moved.moves)), *(f"  note     {n}" for n in moved.notes)])


def lines(moves: Sequence[Move]) -> list[str]:
    """One line a kind of move and of tensor, and under it where the tensors come from."""
    found: list[str] = []
    shown = sorted((move for move in moves if move.kind != "outputs"), key=lambda move: ORDER.index(move.kind))
    for group in grouped(shown, lambda m: (m.kind, pattern(m.name), m.text, m.origin and m.origin.id)):
        found += _group(group)
    outputs = [move for move in moves if move.kind == "outputs"]
    for move in outputs[:OUTPUTS]:
        found += _group([move])
    if len(outputs) > OUTPUTS:
        found.append(f"{'outputs':8} and {len(outputs) - OUTPUTS} more places after these")
    return found


def _group(group: Sequence[Move]) -> list[str]:
    first = group[0]
    names = ", ".join(fold_layers(move.name for move in group))
    count = f" ({len(group)})" if len(group) > 1 else ""
    measures = [move.measure for move in group if move.measure]
    said = [_measured(first.kind, measures)] if measures else []
    said += [_ranges(group)] if any(move.before for move in group) else []
    said += [first.text] if first.text else []
    found = [f"{first.kind:8} {names}{count}: {'; '.join(said)}"]
    if first.origin and first.kind != "added":
        made = ", ".join(text for text in (first.origin.made, first.origin.format) if text)
        found += [f"{'':8} made     {made}"] if made else []
        found += [f"{'':8} row      {row}" for row in first.origin.rows]
    return found


def _measured(kind: str, measures: Sequence[Measure]) -> str:
    changed, samples = sum(m.changed for m in measures), sum(m.samples for m in measures)
    broken = sum(m.broken for m in measures)
    if not changed and kind != "outputs":
        return f"other bytes, none of them among {samples:,} samples"
    count = f"{changed:,} of {samples:,} samples ({changed / samples:.0%})"
    broke = "to or from NaN or infinity"
    if broken == changed:
        return f"{count} {broke}"
    if broken:
        return f"{count} {_far(measures)}, {broken:,} of them {broke}"
    return _far(measures) if kind == "outputs" else f"{count} {_far(measures)}"


def _far(measures: Sequence[Measure]) -> str:
    """The largest differences of numbers: of all tensors, each by its own measure."""
    most = max((m.most for m in measures if m.most is not None), default=None)
    relative = max((m.relative for m in measures if m.relative is not None), default=None)
    if most is None:
        return "by more than a number can tell"
    return f"by at most {most:.3g}" + ("" if relative is None else f", relative L2 {relative:.2g}")


def _ranges(group: Sequence[Move]) -> str:
    """Extent and mean before and after, of the tensor whose extent changed most."""

    def extent(move: Move, which: str) -> float:
        found = getattr(move, which)
        return max(abs(found.min or 0.0), abs(found.max or 0.0)) if found else 0.0

    worst = max(group, key=lambda move: abs(extent(move, "after") - extent(move, "before")))
    a, b = worst.before, worst.after
    if a is None or b is None or a == b:
        return "extent and mean as before"
    digits = 4 if _range(a, 4) != _range(b, 4) else 9  # one code of a million shows late in the mean
    return f"{_range(a, digits)} -> {_range(b, digits)}"


def _range(of: Statistics, digits: int) -> str:
    bad = f" and {of.nonfinite:,} not finite" if of.nonfinite else ""
    if of.min is None or of.max is None or of.mean is None:
        return f"no finite number{bad}"
    return f"{of.min:.{digits}g} .. {of.max:.{digits}g} (mean {of.mean:.{digits}g}){bad}"
