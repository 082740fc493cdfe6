"""The differences between two snapshots, and their text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.core.text import fold_layers, grouped, pattern
from bridge.core.values import plain
from bridge.workflows.golden.values import Origin, Statistics

IN_HEADER = ("layout", "missing", "added")  # kinds of moves that also change the header of a file

ORDER = ("plan", "file", "missing", "added", "layout", "scales", "codes", "weights", "made", "outputs")
MAX_OUTPUTS = 4  # inner values and outputs that are shown; the first that moved shows where it began


def lines(moves: Sequence[Move]) -> list[str]:
    """One line per kind of move and of tensor, followed by how the tensors were made."""
    result: list[str] = []
    shown = sorted((move for move in moves if move.kind != "outputs"), key=lambda move: ORDER.index(move.kind))
    for group in grouped(shown, lambda m: (m.kind, pattern(m.name), m.text, m.origin and m.origin.id)):
        result += _group_lines(group)
    outputs = [move for move in moves if move.kind == "outputs"]
    for move in outputs[:MAX_OUTPUTS]:
        result += _group_lines([move])
    if len(outputs) > MAX_OUTPUTS:
        result.append(f"{'outputs':8} and {len(outputs) - MAX_OUTPUTS} more places after these")
    return result


def _group_lines(group: Sequence[Move]) -> list[str]:
    first = group[0]
    names = ", ".join(fold_layers(move.name for move in group))
    count = f" ({len(group)})" if len(group) > 1 else ""
    measures = [move.measure for move in group if move.measure]
    parts = [_measured(first.kind, measures)] if measures else []
    parts += [_ranges(group)] if any(move.before for move in group) else []
    parts += [first.text] if first.text else []
    result = [f"{first.kind:8} {names}{count}: {'; '.join(parts)}"]
    if first.origin and first.kind != "added":
        made = ", ".join(text for text in (first.origin.made, first.origin.format) if text)
        result += [f"{'':8} made     {made}"] if made else []
        result += [f"{'':8} row      {row}" for row in first.origin.rows]
    return result


def _measured(kind: str, measures: Sequence[Measure]) -> str:
    changed, samples = sum(m.changed for m in measures), sum(m.samples for m in measures)
    broken = sum(m.broken for m in measures)
    if not changed and kind != "outputs":
        return f"bytes differ, but no one of {samples:,} samples does"
    count = f"{changed:,} of {samples:,} samples ({changed / samples:.0%})"
    broke = "to or from NaN or infinity"
    if broken == changed:
        return f"{count} {broke}"
    if broken:
        return f"{count} {_difference(measures)}, {broken:,} of them {broke}"
    return _difference(measures) if kind == "outputs" else f"{count} {_difference(measures)}"


def _difference(measures: Sequence[Measure]) -> str:
    """The largest absolute and the largest relative difference of all tensors."""
    most = max((m.most for m in measures if m.most is not None), default=None)
    relative = max((m.relative for m in measures if m.relative is not None), default=None)
    if most is None:
        return "by more than the largest float"
    return f"by at most {most:.3g}" + ("" if relative is None else f", relative L2 {relative:.2g}")


def _ranges(group: Sequence[Move]) -> str:
    """Range and mean before and after, of the tensor whose largest magnitude changed most."""

    def magnitude(statistics: Statistics | None) -> float:
        return max(abs(statistics.min or 0.0), abs(statistics.max or 0.0)) if statistics else 0.0

    worst = max(group, key=lambda move: abs(magnitude(move.after) - magnitude(move.before)))
    a, b = worst.before, worst.after
    if a is None or b is None or a == b:
        return "range and mean as before"
    digits = 4 if _range(a, 4) != _range(b, 4) else 9  # one code of a million shows only in the mean's last digits
    return f"{_range(a, digits)} -> {_range(b, digits)}"


def _range(of: Statistics, digits: int) -> str:
    bad = f" and {of.nonfinite:,} not finite" if of.nonfinite else ""
    if of.min is None or of.max is None or of.mean is None:
        return f"no finite number{bad}"
    return f"{of.min:.{digits}g} .. {of.max:.{digits}g} (mean {of.mean:.{digits}g}){bad}"


@dataclass(frozen=True)
class Measure:
    """The difference of two sets of samples: how many changed of how many, the largest difference, relative L2.

    `most` and `relative` are of the decoded values that are finite before and after; `relative` is None if all were
    zero. `broken`: how many changed to or from NaN or an infinity.
    """

    changed: int
    samples: int
    most: float | None
    relative: float | None
    broken: int = 0


@dataclass(frozen=True)
class Move:
    """One difference. `kind`: "codes", "scales", "weights" (values of a tensor), "layout" (shape, dtype, file, order),
    "missing", "added", "made" (only expression, format or row), "file", "plan", "outputs".
    """

    kind: str
    name: str
    text: str
    file: str = ""
    origin: Origin | None = None
    measure: Measure | None = None
    before: Statistics | None = None
    after: Statistics | None = None


@dataclass(frozen=True)
class Moved:
    """What `check` and `diff` return; `passed` if nothing moved. Its text lists everything, layers folded.

    `tensors`: how many were compared. `notes`: differences and omissions that do not count.
    """

    before: str
    after: str
    tensors: int
    moves: tuple[Move, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.moves

    def to_json(self) -> str:
        """Everything as JSON, one entry per tensor."""
        return json.dumps({**plain(self), "passed": self.passed}, indent=2, allow_nan=False)

    def __str__(self) -> str:
        head = f"{self.after} against {self.before}: "
        if self.passed:
            head += f"nothing moved, {self.tensors:,} tensors"
        else:
            counts = Counter(move.kind for move in self.moves)
            kinds = ", ".join(f"{kind} {counts[kind]:,}" for kind in ORDER if counts[kind])
            tensors = {(move.file, move.name) for move in self.moves if move.origin}
            head += f"{len(tensors):,} of {self.tensors + counts['added']:,} tensors moved ({kinds})"
        return "\n".join([head, *(f"  {line}" for line in lines(self.moves)), *(f"  note     {n}" for n in self.notes)])
