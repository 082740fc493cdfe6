"""What moved between two snapshots of a model, in which tensors, from which rows, and by how much; reads no file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from bridge.dtypes import DTYPES
from bridge.golden.digests import as_floats
from bridge.golden.values import Key, Origin, Reference, Snapshot, Statistics, Tensor
from bridge.quant.bits import Array
from bridge.values import plain
from bridge.verification import relative_l2

SHAPING = ("layout", "missing", "added")  # kinds that the header of a file shows too


class Side(Protocol):
    """Where statistics of a few tensors of a snapshot come from."""

    def statistics(self, keys: Iterable[Key]) -> dict[Key, Statistics]: ...


@dataclass(frozen=True)
class Measure:
    """How far samples lie from each other: how many differ of how many, the largest difference, relative L2.

    `most` and `relative` are those of what the bits stand for, where it is finite before and now; `relative` is None
    where all were zero. `broken`: how many became or were NaN or an infinity, and are not the same now.
    """

    changed: int
    samples: int
    most: float | None
    relative: float | None
    broken: int = 0


@dataclass(frozen=True)
class Move:
    """One thing that is not what it was. `kind`: "codes", "scales", "weights" (values of a tensor), "layout" (shape,
    dtype, file, order), "missing", "added", "made" (expression, format or row alone), "file", "plan", "outputs".
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
    """What `check` and `diff` return; `passed` where nothing moved. Printing it says everything, layers folded.

    `tensors`: how many there are to compare. `notes`: what differs or was left out and decides nothing.
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
        """All of it as JSON, one entry a tensor."""
        return json.dumps({**plain(self), "passed": self.passed}, indent=2, allow_nan=False)

    def __str__(self) -> str:
        from bridge.golden.text import told

        return told(self)


def compare(before: Snapshot, after: Snapshot, sides: tuple[Side, Side]) -> list[Move]:
    """Everything that differs in bytes, layout or plan: the plan first, then files, then what is in them."""
    pairs, missing, added = _paired(before, after)
    moves = [_alone("missing", before, tensor, "is not written any more") for tensor in missing]
    moves += [_alone("added", after, tensor, "was not written before") for tensor in added]
    differing = {a.key: b.key for a, b in pairs if a.hash != b.hash and (a.shape, a.dtype) == (b.shape, b.dtype)}
    known = sides[0].statistics(differing), sides[1].statistics(differing.values())
    for one, other in pairs:
        said = _layout(one, other)
        if said:
            moves.append(_tensor_move("layout", before, after, one, other, said))
        if one.key in differing:
            move = _tensor_move(after.origin(other).kind, before, after, one, other)
            measure = _measured(before.samples[one.key], after.samples[other.key], one.dtype)
            found = known[0].get(one.key), known[1].get(other.key)
            moves.append(replace(move, measure=measure, before=found[0], after=found[1]))
        elif not said and before.origin(one) != after.origin(other):
            moves.append(_tensor_move("made", before, after, one, other))
    shaped = {move.file for move in moves if move.kind in SHAPING}
    return [*_plan(before, after), *_files(before, after, shaped), *moves]


def outputs_moved(before: Reference, after: Reference) -> list[Move]:
    """What a run gave otherwise, beyond the tolerance of the golden, in the order of the layers, the outputs last."""
    found = []
    for name, expected in before.values.items():
        values = after.values.get(name)
        if values is None or values.shape != expected.shape:
            found.append(Move("outputs", name, "is not computed any more, or has another shape"))
            continue
        measure = _measured(expected, values, "float32")
        if measure.broken or measure.relative is None or measure.relative > before.tolerance:
            found.append(Move("outputs", name, f"tolerance {before.tolerance:g}", measure=measure))
    return found


def _paired(before: Snapshot, after: Snapshot) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor], list[Tensor]]:
    """Tensors of one name and file; then those that went to another file, where the name tells which."""
    pairs = [(tensor, after.tensors[key]) for key, tensor in sorted(before.tensors.items()) if key in after.tensors]
    gone = [tensor for key, tensor in sorted(before.tensors.items()) if key not in after.tensors]
    new = [tensor for key, tensor in sorted(after.tensors.items()) if key not in before.tensors]
    elsewhere = _by_unique_name(new)
    moved = {name: tensor for name, tensor in _by_unique_name(gone).items() if name in elsewhere}
    pairs += [(tensor, elsewhere[name]) for name, tensor in moved.items()]
    return pairs, [t for t in gone if t.name not in moved], [t for t in new if t.name not in moved]


def _by_unique_name(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.name, []).append(tensor)
    return {name: held[0] for name, held in found.items() if len(held) == 1}


def _plan(before: Snapshot, after: Snapshot) -> Iterator[Move]:
    a, b = before.made, after.made
    if a == b:
        return
    said = []
    for name in ("target", "architecture", "scheme", "scheme_digest"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            said.append(f"{name} {one[:12]} -> {other[:12]}" if name.endswith("digest") else f"{name} {one} -> {other}")
    for name in sorted({*a.options, *b.options}):
        if a.options.get(name) != b.options.get(name):
            said.append(f"option {name} {a.options.get(name)!r} -> {b.options.get(name)!r}")
    if a.plan_digest != b.plan_digest:
        rest = "" if said else "; see the tensors, or else its source tensors or notes differ"
        said.append(f"digest {a.plan_digest[:12]} -> {b.plan_digest[:12]}{rest}")
    yield Move("plan", "plan", "; ".join(said))


def _alone(kind: str, of: Snapshot, tensor: Tensor, text: str) -> Move:
    spec = f"{tensor.dtype} {list(tensor.shape)}"
    return Move(kind, tensor.name, f"{spec} {text}", tensor.file, of.origin(tensor))


def _layout(one: Tensor, other: Tensor) -> str:
    said = [f"dtype {one.dtype} -> {other.dtype}"] * (one.dtype != other.dtype)
    said += [f"shape {list(one.shape)} -> {list(other.shape)}"] * (one.shape != other.shape)
    return ", ".join(said + [f"file {one.file} -> {other.file}"] * (one.file != other.file))


def _tensor_move(kind: str, before: Snapshot, after: Snapshot, one: Tensor, other: Tensor, said: str = "") -> Move:
    was, now = before.origin(one), after.origin(other)
    text = "; ".join([said] * bool(said) + _origin_moved(was, now))
    return Move(kind, one.name, text, other.file, now)


def _measured(one: Array, other: Array, dtype: str) -> Measure:
    kind = f"u{np.dtype(DTYPES[dtype].storage).itemsize}"
    changed = one.view(kind) != other.view(kind)
    a, b = as_floats(one, dtype), as_floats(other, dtype)
    finite = np.isfinite(a) & np.isfinite(b)
    broken = ~finite & (a != b) & ~(np.isnan(a) & np.isnan(b))  # a NaN is what it was, whatever its sign
    a, b = a[finite], b[finite]
    with np.errstate(over="ignore"):
        most = float(np.abs(b - a).max(initial=0.0))
        relative = relative_l2(b, a) if a.any() or not b.any() else np.inf
    return Measure(
        int(changed.sum()), one.size, most if np.isfinite(most) else None, relative if np.isfinite(relative) else None,
        int(broken.sum()),
    )  # fmt: skip


def _origin_moved(was: Origin, now: Origin) -> list[str]:
    said = [f"format {was.format or 'none'} -> {now.format or 'none'}"] * (was.format != now.format)
    said += [f"expression was {was.made}"] * (was.made != now.made)
    return said + [f"row was {row}" for row in was.rows if row not in now.rows]


def _files(before: Snapshot, after: Snapshot, told: set[str]) -> Iterator[Move]:
    for name in sorted({*before.files, *after.files}):
        one, other = before.files.get(name), after.files.get(name)
        if one == other:
            continue
        if one is None or other is None:
            yield Move("file", name, "is not written any more" if other is None else "was not written before", name)
        elif not (one.header or other.header):
            size = f"{one.bytes} -> {other.bytes} bytes" if one.bytes != other.bytes else f"{one.bytes} bytes as before"
            yield Move("file", name, f"another content, {size}", name)
        elif name not in told:  # else its header says what its tensors say
            yield Move("layout", name, "order or place of its tensors, or what its header says besides", name)


def versions_moved(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Versions that differ, which decides nothing: what they do to the bytes is told by the bytes."""
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return [f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}" for name in names]
