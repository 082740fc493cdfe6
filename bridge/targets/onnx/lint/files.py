"""Rules on external data and its safetensors header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bridge.targets.onnx.lint.model import BY_ONNX, External, Model, external, nbytes
from bridge.targets.onnx.lint.problem import PORTABILITY, Problem


def _outside(model: Model) -> Iterator[tuple[str, External]]:
    for name, tensor in model.initializers.items():
        place = external(tensor)
        if place is not None:
            yield name, place


def locations(model: Model) -> Iterator[Problem]:
    for place in sorted({place.location for _, place in _outside(model)}):
        if not place or Path(place).name != place or "\\" in place:
            yield Problem(
                place or "(empty)",
                f"{PORTABILITY}external data must be a plain file name: TensorRT, ONNX Runtime and onnx.checker accept "
                "different other paths; put the file into the directory of the .onnx",
            )


def files(model: Model) -> Iterator[Problem]:
    for place in sorted({place.location for _, place in _outside(model)}):
        path = model.path.parent / place
        if path.is_symlink():
            yield Problem(place, f"{PORTABILITY}is a symbolic link, which onnx.checker refuses: copy the file")
        elif not path.is_file():
            yield Problem(place, "does not exist beside the .onnx: copy both files together")
        elif path.stat().st_nlink > 1:
            yield Problem(
                place,
                f"{PORTABILITY}is a hard link, which onnx.checker refuses: copy the file (cp --reflink=auto)",
            )


def bounds(model: Model) -> Iterator[Problem]:
    for name, place in _outside(model):
        tensor = model.initializers[name]
        if tensor.data_type not in BY_ONNX:
            yield Problem(name, f"unknown ONNX data type {tensor.data_type}: write the model again")
            continue
        expected = nbytes(tensor)
        if place.offset < 0:
            yield Problem(name, "offset or length is not a number of bytes: write the model again")
            continue
        if place.length is not None and place.length != expected:
            yield Problem(
                name,
                f"length is {place.length}, but {list(tensor.dims)} of {BY_ONNX[tensor.data_type].name} needs "
                f"{expected}: shape, dtype or length is wrong",
            )
        path = model.path.parent / place.location
        end = place.offset + max(expected, place.length or 0)
        if path.is_file() and end > path.stat().st_size:
            why = f"ends at byte {end}, but {place.location} has {path.stat().st_size} bytes"
            yield Problem(name, why)


def overlaps(model: Model) -> Iterator[Problem]:
    """Tied tensors may share a whole region; a partial overlap is a wrong offset."""
    spans: dict[tuple[str, int, int], str] = {}
    for name, place in _outside(model):
        tensor = model.initializers[name]
        if tensor.data_type in BY_ONNX and nbytes(tensor):
            spans.setdefault((place.location, place.offset, place.offset + nbytes(tensor)), name)
    last: tuple[str, int, int] | None = None
    for span in sorted(spans):
        if last is not None and span[0] == last[0] and span[1] < last[2]:
            why = f"begins at byte {span[1]}, inside {spans[last]} (to {last[2]}): offsets are wrong"
            yield Problem(spans[span], why)
        last = span if last is None or span[0] != last[0] or span[2] > last[2] else last


def inline(model: Model) -> Iterator[Problem]:
    for name, tensor in model.initializers.items():
        if tensor.data_type in BY_ONNX and external(tensor) is None and nbytes(tensor):
            stored = (tensor.raw_data, tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.uint64_data)
            if not any(len(field) for field in (*stored, tensor.double_data)):
                why = f"{list(tensor.dims)} has no data, inline or external: the weight was never written"
                yield Problem(name, why)


def headers(model: Model) -> Iterator[Problem]:
    for file, header in model.headers.items():
        if header.problem:
            yield Problem(file, f"{PORTABILITY}{header.problem}: not a safetensors file; write it again")
            continue
        for name, (_, _, begin, end) in header.entries.items():
            if not header.data <= begin <= end <= header.size:
                yield Problem(
                    name, f"{PORTABILITY}safetensors has it at {begin}..{end}, but the file has {header.size} bytes"
                )
    for name, place in _outside(model):
        stored_header = model.headers.get(place.location)
        if stored_header is None or stored_header.problem or model.initializers[name].data_type not in BY_ONNX:
            continue
        if name not in stored_header.entries:
            yield Problem(
                name, f"{PORTABILITY}is not in the header of {place.location}: safetensors readers would not see it"
            )
        elif differ := _differences(model.initializers[name], place, stored_header.entries[name]):
            why = f"ONNX and the safetensors header disagree: {', '.join(differ)}; write the model again"
            yield Problem(name, PORTABILITY + why)


def _differences(tensor: Any, place: External, entry: tuple[str, list[int], int, int]) -> list[str]:
    kind = BY_ONNX[tensor.data_type]
    dims = list(tensor.dims)
    if kind.bits == 4:  # two values to a byte along the last axis
        dims = [*dims[:-1], (dims[-1] + 1) // 2] if dims else [1]
    ours = (kind.safetensors, dims, place.offset, place.offset + nbytes(tensor))
    names = ("dtype", "shape", "first byte", "end")
    pairs = zip(names, ours, entry, strict=True)
    return [f"{what} {mine} / {theirs}" for what, mine, theirs in pairs if mine != theirs]


def unused(model: Model) -> Iterator[Problem]:
    outputs = {value.name for value in model.proto.graph.output}
    for name, tensor in model.initializers.items():
        if name not in model.users and name not in outputs:
            size = int(np.prod(tensor.dims, dtype=np.int64))
            yield Problem(name, f"no node reads this initializer of {size} values: a weight is misplaced", "warning")
    for place, header in model.headers.items():
        for name in header.entries:
            module, _, part = name.rpartition(".")
            # Modules that read the same input share its nodes; the file keeps the scale of each for other readers.
            read = model.initializers.keys() | model.beside
            if part in ("input_scale", "pre_quant_scale") and f"{module}.weight" in read:
                continue
            if name not in read:
                yield Problem(name, f"is in {place}, but not in the graph: unused bytes", "warning")
