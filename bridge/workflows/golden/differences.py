"""Differences between two snapshots: their values, the comparison, their text."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.records import plain
from bridge.core.text import fold_layers, grouped, layer_numbers, pattern
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.decode import as_floats
from bridge.verification.outputs import relative_l2
from bridge.workflows.golden.store import Key, Origin, Reference, Snapshot, Statistics, Tensor

IN_HEADER = ("layout", "missing", "added", "renamed")  # kinds of moves that also change the header of a file

ORDER = ("plan", "file", "missing", "added", "renamed", "layout", "scales", "codes", "weights", "made", "outputs")
MAX_OUTPUTS = 4  # inner values and outputs that are shown; the first that moved shows where it began
StatisticsOf = Callable[[Iterable[Key]], dict[Key, Statistics]]  # the statistics of some tensors of a snapshot


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
class Difference:
    """One difference. `kind`: "codes", "scales", "weights" (values of a tensor), "layout" (shape, dtype, file, order),
    "missing", "added", "renamed" (the same bytes), "made" (only expression, format or row), "file", "plan", "outputs".
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
class Differences:
    """What `check` and `diff` return; `passed` if there are none. Its text lists everything, layers folded.

    `tensors`: how many were compared. `notes`: differences and omissions that do not count.
    """

    before: str
    after: str
    tensors: int
    moves: tuple[Difference, ...]
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


def compare(before: Snapshot, after: Snapshot, of_before: StatisticsOf, of_after: StatisticsOf) -> list[Difference]:
    """All differences in bytes, layout or plan: the plan first, then files, then tensors."""
    pairs, missing, added = _paired(before, after)
    renamed, missing, added = _renamed(missing, added)
    moves = [_unpaired("missing", before, tensor, "is no longer written") for tensor in missing]
    moves += [_unpaired("added", after, tensor, "was not written before") for tensor in added]
    moves += [_of_tensor("renamed", before, after, one, other, _new_name(one, other)) for one, other in renamed]
    differing = {a.key: b.key for a, b in pairs if a.hash != b.hash and (a.shape, a.dtype) == (b.shape, b.dtype)}
    known = of_before(differing), of_after(differing.values())
    for one, other in pairs:
        layout = _layout(one, other)
        if layout:
            moves.append(_of_tensor("layout", before, after, one, other, layout))
        if one.key in differing:
            move = _of_tensor(after.origin(other).kind, before, after, one, other)
            measure = _measure(before.samples[one.key], after.samples[other.key], one.dtype)
            moves.append(replace(move, measure=measure, before=known[0].get(one.key), after=known[1].get(other.key)))
        elif not layout and before.origin(one) != after.origin(other):
            moves.append(_of_tensor("made", before, after, one, other))
    reported = {move.file for move in moves if move.kind in IN_HEADER}
    return [*_plan(before, after), *_files(before, after, reported), *moves]


def compare_outputs(before: Reference, after: Reference) -> list[Difference]:
    """Values of a run that differ by more than the golden's tolerance, in layer order, the outputs last."""
    moves = []
    for name, expected in before.values.items():
        values = after.values.get(name)
        if values is None or values.shape != expected.shape:
            moves.append(Difference("outputs", name, "is no longer computed, or has another shape"))
            continue
        measure = _measure(expected, values, "float32")
        if measure.broken or measure.relative is None or measure.relative > before.tolerance:
            moves.append(Difference("outputs", name, f"tolerance {before.tolerance:g}", measure=measure))
    return moves


def _paired(before: Snapshot, after: Snapshot) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor], list[Tensor]]:
    """Tensors with the same name and file, then those that moved to another file (by unique names); then the rest."""
    pairs = [(tensor, after.tensors[key]) for key, tensor in sorted(before.tensors.items()) if key in after.tensors]
    gone = [tensor for key, tensor in sorted(before.tensors.items()) if key not in after.tensors]
    new = [tensor for key, tensor in sorted(after.tensors.items()) if key not in before.tensors]
    elsewhere = _by_unique_name(new)
    moved = {name: tensor for name, tensor in _by_unique_name(gone).items() if name in elsewhere}
    pairs += [(tensor, elsewhere[name]) for name, tensor in moved.items()]
    return pairs, [t for t in gone if t.name not in moved], [t for t in new if t.name not in moved]


def _renamed(gone: list[Tensor], new: list[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor], list[Tensor]]:
    """Tensors of more than one value with the same bytes under another name, in the order of the names; then the rest.

    As many must be gone as are new: else any of them may be the copy.
    """

    def content(tensor: Tensor) -> tuple[str, str, tuple[int, ...]]:
        return tensor.hash, tensor.dtype, tensor.shape

    before, after = ({content(group[0]): group for group in grouped(side, content)} for side in (gone, new))
    same = [(one, after[key]) for key, one in before.items() if key in after and math.prod(key[2]) > 1]
    pairs = [pair for one, other in same if len(one) == len(other) for pair in zip(one, other, strict=True)]
    taken = {tensor.key for pair in pairs for tensor in pair}
    return pairs, [t for t in gone if t.key not in taken], [t for t in new if t.key not in taken]


def _new_name(one: Tensor, other: Tensor) -> str:
    return f"is now {other.name}" + f", file {one.file} -> {other.file}" * (one.file != other.file)


def _by_unique_name(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {group[0].name: group[0] for group in grouped(tensors, lambda tensor: tensor.name) if len(group) == 1}


def _plan(before: Snapshot, after: Snapshot) -> Iterator[Difference]:
    a, b = before.made, after.made
    if replace(a, rounding=a.rounding or b.rounding) == b:  # older goldens do not name it
        return
    parts = [f"rounding {a.rounding} -> {b.rounding}"] if a.rounding and a.rounding != b.rounding else []
    for name in ("target", "architecture", "scheme", "scheme_digest", "rotation"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            length = 12 if name.endswith("digest") else None
            parts.append(f"{name} {one[:length]} -> {other[:length]}")
    for name in sorted({*a.options, *b.options}):
        if a.options.get(name) != b.options.get(name):
            parts.append(f"option {name} {a.options.get(name)!r} -> {b.options.get(name)!r}")
    if a.plan_digest != b.plan_digest:
        hint = "" if parts else "; see the tensors, otherwise its source tensors or notes differ"
        parts.append(f"digest {a.plan_digest[:12]} -> {b.plan_digest[:12]}{hint}")
    yield Difference("plan", "plan", "; ".join(parts))


def _unpaired(kind: str, of: Snapshot, tensor: Tensor, text: str) -> Difference:
    spec = f"{tensor.dtype} {list(tensor.shape)}"
    return Difference(kind, tensor.name, f"{spec} {text}", tensor.file, of.origin(tensor))


def _layout(one: Tensor, other: Tensor) -> str:
    parts = [f"dtype {one.dtype} -> {other.dtype}"] * (one.dtype != other.dtype)
    parts += [f"shape {list(one.shape)} -> {list(other.shape)}"] * (one.shape != other.shape)
    return ", ".join(parts + [f"file {one.file} -> {other.file}"] * (one.file != other.file))


def _of_tensor(kind: str, before: Snapshot, after: Snapshot, one: Tensor, other: Tensor, text: str = "") -> Difference:
    was, now = before.origin(one), after.origin(other)
    return Difference(kind, one.name, "; ".join([text] * bool(text) + _origin_text(was, now)), other.file, now)


def _measure(one: Array, other: Array, dtype: str) -> Measure:
    kind = f"u{np.dtype(DTYPES[dtype].storage).itemsize}"
    changed = one.view(kind) != other.view(kind)
    a, b = as_floats(one, dtype), as_floats(other, dtype)
    finite = np.isfinite(a) & np.isfinite(b)
    broken = ~finite & (a != b) & ~(np.isnan(a) & np.isnan(b))  # two NaNs are equal, whatever their signs
    a, b = a[finite], b[finite]
    with np.errstate(over="ignore"):
        most = float(np.abs(b - a).max(initial=0.0))
        relative = relative_l2(b, a) if a.any() or not b.any() else np.inf
    return Measure(
        int(changed.sum()), one.size, most if np.isfinite(most) else None, relative if np.isfinite(relative) else None,
        int(broken.sum()),
    )  # fmt: skip


def _origin_text(was: Origin, now: Origin) -> list[str]:
    parts = [f"format {was.format or 'none'} -> {now.format or 'none'}"] * (was.format != now.format)
    parts += [f"expression was {was.made}"] * (was.made != now.made)
    return parts + [f"row was {row}" for row in was.rows if row not in now.rows]


def _files(before: Snapshot, after: Snapshot, reported: set[str]) -> Iterator[Difference]:
    for name in sorted({*before.files, *after.files}):
        one, other = before.files.get(name), after.files.get(name)
        if one == other:
            continue
        if one is None or other is None:
            yield Difference("file", name, "is no longer written" if other is None else "was not written before", name)
        elif not (one.header or other.header):
            size = f"{one.bytes} -> {other.bytes} bytes" if one.bytes != other.bytes else f"{one.bytes} bytes as before"
            yield Difference("file", name, f"its content differs, {size}", name)
        elif name not in reported:  # else its header moved because its tensors did
            yield Difference("layout", name, "order or position of its tensors, or the rest of its header", name)


def lines(moves: Sequence[Difference]) -> list[str]:
    """One line per kind of difference and of tensor, followed by the origin of the tensors."""
    result: list[str] = []
    shown = sorted((move for move in moves if move.kind != "outputs"), key=lambda move: ORDER.index(move.kind))
    for group in grouped(shown, lambda m: (m.kind, pattern(m.name), _folded(m), _source(m))):
        result += _group_lines(group)
    outputs = [move for move in moves if move.kind == "outputs"]
    for move in outputs[:MAX_OUTPUTS]:
        result += _group_lines([move])
    if len(outputs) > MAX_OUTPUTS:
        result.append(f"{'outputs':8} and {len(outputs) - MAX_OUTPUTS} more places after these")
    return result


def _folded(move: Difference) -> str:
    """A difference's text; of a tensor with a new name that has the same numbers, without them, so that layers fold."""
    new = move.text.split(";")[0] if move.kind == "renamed" else ""
    return pattern(move.text) if layer_numbers(move.name) == layer_numbers(new) else move.text


def _source(move: Difference) -> Origin | None:
    """A difference's origin; of a tensor that no plan has, whose origin is its own name, without numbers."""
    return move.origin and replace(move.origin, tensors=pattern(move.origin.tensors))


def _group_lines(group: Sequence[Difference]) -> list[str]:
    first = group[0]
    names = ", ".join(fold_layers(move.name for move in group))
    count = f" ({len(group)})" if len(group) > 1 else ""
    measures = [move.measure for move in group if move.measure]
    parts = [_measures_text(first.kind, measures)] if measures else []
    parts += [_ranges(group)] if any(move.before for move in group) else []
    texts = fold_layers(move.text for move in group) if first.kind == "renamed" else [first.text]
    parts += [text for text in texts if text]
    result = [f"{first.kind:8} {names}{count}: {'; '.join(parts)}"]
    if first.origin and first.kind != "added":
        made = ", ".join(text for text in (first.origin.made, first.origin.format) if text)
        result += [f"{'':8} made     {made}"] if made else []
        result += [f"{'':8} row      {row}" for row in first.origin.rows]
    return result


def _measures_text(kind: str, measures: Sequence[Measure]) -> str:
    changed, samples = sum(m.changed for m in measures), sum(m.samples for m in measures)
    broken = sum(m.broken for m in measures)
    if not changed and kind != "outputs":
        return f"bytes changed, and none of the {samples:,} sampled values did"
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


def _ranges(group: Sequence[Difference]) -> str:
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
