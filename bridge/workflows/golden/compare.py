"""Compare two snapshots of a model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.decode import as_floats
from bridge.verification.outputs import relative_l2
from bridge.workflows.golden.moved import IN_HEADER, Measure, Move
from bridge.workflows.golden.values import Key, Origin, Reference, Snapshot, Statistics, Tensor

StatisticsOf = Callable[[Iterable[Key]], dict[Key, Statistics]]  # the statistics of some tensors of a snapshot


def compare(before: Snapshot, after: Snapshot, of_before: StatisticsOf, of_after: StatisticsOf) -> list[Move]:
    """All differences in bytes, layout or plan: the plan first, then files, then tensors."""
    pairs, missing, added = _paired(before, after)
    moves = [_unpaired("missing", before, tensor, "is no longer written") for tensor in missing]
    moves += [_unpaired("added", after, tensor, "was not written before") for tensor in added]
    differing = {a.key: b.key for a, b in pairs if a.hash != b.hash and (a.shape, a.dtype) == (b.shape, b.dtype)}
    known = of_before(differing), of_after(differing.values())
    for one, other in pairs:
        layout = _layout(one, other)
        if layout:
            moves.append(_tensor_move("layout", before, after, one, other, layout))
        if one.key in differing:
            move = _tensor_move(after.origin(other).kind, before, after, one, other)
            measure = _measured(before.samples[one.key], after.samples[other.key], one.dtype)
            moves.append(replace(move, measure=measure, before=known[0].get(one.key), after=known[1].get(other.key)))
        elif not layout and before.origin(one) != after.origin(other):
            moves.append(_tensor_move("made", before, after, one, other))
    reported = {move.file for move in moves if move.kind in IN_HEADER}
    return [*_plan(before, after), *_files(before, after, reported), *moves]


def outputs_moved(before: Reference, after: Reference) -> list[Move]:
    """Values of a run that differ by more than the golden's tolerance, in layer order, the outputs last."""
    moves = []
    for name, expected in before.values.items():
        values = after.values.get(name)
        if values is None or values.shape != expected.shape:
            moves.append(Move("outputs", name, "is no longer computed, or has another shape"))
            continue
        measure = _measured(expected, values, "float32")
        if measure.broken or measure.relative is None or measure.relative > before.tolerance:
            moves.append(Move("outputs", name, f"tolerance {before.tolerance:g}", measure=measure))
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


def _by_unique_name(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    by_name: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    return {name: group[0] for name, group in by_name.items() if len(group) == 1}


def _plan(before: Snapshot, after: Snapshot) -> Iterator[Move]:
    a, b = before.made, after.made
    if a == b:
        return
    parts = []
    for name in ("target", "architecture", "scheme", "scheme_digest"):
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
    yield Move("plan", "plan", "; ".join(parts))


def _unpaired(kind: str, of: Snapshot, tensor: Tensor, text: str) -> Move:
    spec = f"{tensor.dtype} {list(tensor.shape)}"
    return Move(kind, tensor.name, f"{spec} {text}", tensor.file, of.origin(tensor))


def _layout(one: Tensor, other: Tensor) -> str:
    parts = [f"dtype {one.dtype} -> {other.dtype}"] * (one.dtype != other.dtype)
    parts += [f"shape {list(one.shape)} -> {list(other.shape)}"] * (one.shape != other.shape)
    return ", ".join(parts + [f"file {one.file} -> {other.file}"] * (one.file != other.file))


def _tensor_move(kind: str, before: Snapshot, after: Snapshot, one: Tensor, other: Tensor, text: str = "") -> Move:
    was, now = before.origin(one), after.origin(other)
    return Move(kind, one.name, "; ".join([text] * bool(text) + _origin_moved(was, now)), other.file, now)


def _measured(one: Array, other: Array, dtype: str) -> Measure:
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


def _origin_moved(was: Origin, now: Origin) -> list[str]:
    parts = [f"format {was.format or 'none'} -> {now.format or 'none'}"] * (was.format != now.format)
    parts += [f"expression was {was.made}"] * (was.made != now.made)
    return parts + [f"row was {row}" for row in was.rows if row not in now.rows]


def _files(before: Snapshot, after: Snapshot, reported: set[str]) -> Iterator[Move]:
    for name in sorted({*before.files, *after.files}):
        one, other = before.files.get(name), after.files.get(name)
        if one == other:
            continue
        if one is None or other is None:
            yield Move("file", name, "is no longer written" if other is None else "was not written before", name)
        elif not (one.header or other.header):
            size = f"{one.bytes} -> {other.bytes} bytes" if one.bytes != other.bytes else f"{one.bytes} bytes as before"
            yield Move("file", name, f"its content differs, {size}", name)
        elif name not in reported:  # else its header moved because its tensors did
            yield Move("layout", name, "order or position of its tensors, or the rest of its header", name)
