"""What was written, read back: tensors of a finished directory, compared with the source they came from.

Nothing here knows what the conversion held in memory, but for the plan. Weights are compared in pieces of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.container import SafetensorsFile
from bridge.dcp import DISTCP
from bridge.dtypes import to_float32
from bridge.errors import VerifyError, fold_layers
from bridge.planning import Output, Plan, Step
from bridge.quant.bits import Array, cast, smooth
from bridge.quant.blocks import grid, packing
from bridge.quant.compare import Comparer, Parity, compare
from bridge.reading import Buffers, Part, Rows
from bridge.sources import lazy

if TYPE_CHECKING:
    from bridge.calibrated import Statistics
    from bridge.dcp.checkpoint import Checkpoint
    from bridge.sources import Source

ROUNDINGS = 4  # smoothed and again for the group's mean; the mean and what is stored of it


class WrittenTensors:
    """The tensors of a plan in the files of a directory; VerifyError where one is not there, or one more is."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._plan = plan
        self._files = {name: open_written(directory / name, plan) for name in plan.files}
        for name, file in self._files.items():
            planned = {spec.name: spec for spec in plan.files[name]}
            missing = [tensor for tensor in planned if tensor not in file.specs]
            more = [tensor for tensor in file.specs if tensor not in planned]
            if missing or more:
                both = {"lacks": missing, "also holds": more}
                said = [f"{verb} {', '.join(fold_layers(names)[:8])}" for verb, names in both.items() if names]
                raise VerifyError(f"{directory / name} {' and '.join(said)}: not what the plan wrote")
        self._folded = {module: step for step in plan.steps for module in step.folded}

    def read(self, output: Output) -> Array:
        """The storage array of one tensor."""
        return self._files[output.file].read(output.spec.name)

    def rows(self, output: Output, first: int, stop: int, of: int, buffers: Buffers) -> Array:
        """The bytes of rows `first` to `stop` of a tensor that is made of `of` equal rows, until the next call."""
        begin, end = (output.spec.nbytes * row // max(of, 1) for row in (first, stop))
        out = buffers.take(f"written {output.part}", (end - begin,), np.uint8)
        return self._files[output.file].read_bytes(output.spec.name, begin, end, out)

    def pre_scale(self, step: Step, source: Source) -> Array | None:
        """What the input is multiplied by, float32 (in,), as the files have it: stored, or multiplied into the norm."""
        stored = next((o for o in step.outputs if o.part == "pre_quant_scale"), None)
        if stored:
            return cast(self.read(stored), stored.spec.dtype, "float32")
        norm = self._folded.get(step.unified[0]) if step.unified else None
        if norm is None:
            return None
        spec, output = self._plan.sources[norm.source], norm.outputs[0]
        before = to_float32(lazy(source, norm.source).read(), spec.dtype) + np.float32(norm.plus_one)
        after = to_float32(self.read(output), output.spec.dtype) + np.float32(norm.plus_one)
        return np.divide(after, before, out=np.ones_like(after), where=before != 0)


def open_written(path: Path, plan: Plan) -> SafetensorsFile | Checkpoint:
    """Open one weight file of a plan to read its tensors by name."""
    if path.suffix != DISTCP:
        return SafetensorsFile(path)
    from bridge.dcp.checkpoint import Checkpoint  # and with it the readers of foreign checkpoints

    return Checkpoint(path.parent, plan.files[path.name])


def equal_bytes(one: Array, other: Array) -> bool:
    """True where two C-contiguous arrays hold the same bytes, read eight at a time."""
    a, b = (array.reshape(-1).view(np.uint8) for array in (one, other))
    whole = a.size // 8 * 8
    return np.array_equal(a[whole:], b[whole:]) and np.array_equal(a[:whole].view(np.uint64), b[:whole].view(np.uint64))


def compare_rows(
    step: Step, source: Source, written: WrittenTensors, statistics: Statistics, buffers: Buffers
) -> Parity:
    """Compare a weight whose stored rows follow its source's, in pieces; nothing is held whole."""
    assert step.format and step.site
    rows = Rows(step, source, buffers)
    outputs = {output.part: output for output in step.outputs}
    numeric, above = step.format.weight, outputs.get("scale_2")
    blocks = grid(numeric[0], (rows.rows, rows.cols), "out_in", step.source)
    packed = packing(numeric[0], "out_in", False, step.coding)
    smoothed = _smoother(step, rows.spec.dtype, source, written, statistics)
    comparer = Comparer(
        numeric,
        rows.spec.dtype,
        blocks,
        packed,
        step.coding,
        written.read(above) if above else None,
        roundings=smoothed.roundings,
        take=buffers.take,
    )
    down, codes, scale = blocks.down if blocks.down < blocks.rows else 0, outputs["weight"], outputs["scale"]
    whole = None if down else written.read(scale)
    total = Parity(0.0, 0.0, 0.0, 0.0, 0.0)
    for first, parts in rows.pieces(math.lcm(down or 1, 2)):
        stop = parts[-1].stop
        bits = _joined([(part, smoothed(part.slice.module, part.bits)) for part in parts], buffers)
        stored = written.rows(codes, first, stop, rows.rows, buffers)
        stored = stored.reshape(-1, codes.spec.nbytes // (rows.rows // 2 if packed == "out" else rows.rows))
        found = whole
        if found is None:
            found = written.rows(scale, first // down, -(-stop // down), blocks.shape[0], buffers)
        total += comparer.rows(bits, stored, found)
    return total


def compare_whole(
    step: Step, source: Source, written: WrittenTensors, statistics: Statistics, buffers: Buffers
) -> Parity:
    """Compare a weight that is stored across its source's rows."""
    assert step.site and step.format
    layout = step.site.layout
    rows = Rows(step, source, buffers)
    arrays = {("codes" if o.part == "weight" else o.part): written.read(o) for o in step.outputs}
    smoothed = _smoother(step, rows.spec.dtype, source, written, statistics)
    bits = smoothed(step.inputs[0].module, rows.whole(), layout)
    block = step.format.weight[0].block
    if len(block) == 2:  # written once per `out`, see targets/trt.py
        arrays["scale"] = arrays["scale"][:, :: block[0]]
    return compare(
        bits,
        rows.spec.dtype,
        arrays,
        step.format.weight,
        layout=layout,
        transpose=step.transpose,
        coding=step.coding,
        roundings=smoothed.roundings,
    )


@dataclass(frozen=True)
class _Smoother:
    """Divides rows by their pre-scale: with a calibration to the bit, else by what is written.

    `roundings`: how often the values may have been rounded otherwise than here.
    """

    step: Step
    dtype: str
    statistics: Statistics
    exact: bool
    scale: Array | None
    roundings: float

    def __call__(self, module: str, bits: Array, layout: str = "out_in") -> Array:
        if self.exact:
            return self.statistics.smoothed(self.step, module, bits, layout)
        return bits if self.scale is None else smooth(bits, self.dtype, self.scale, layout=layout)


def _smoother(step: Step, dtype: str, source: Source, written: WrittenTensors, statistics: Statistics) -> _Smoother:
    assert step.format
    exact = step.format.prescales and statistics.pre_scale(step) is not None
    scale = None if exact else written.pre_scale(step, source)
    roundings = 0.0 if exact or scale is None else ROUNDINGS
    if scale is not None and not any(output.part == "pre_quant_scale" for output in step.outputs):
        roundings = math.inf  # what was folded into a norm cannot be had back where the norm is zero
    return _Smoother(step, dtype, statistics, exact, scale, roundings + statistics.carries)


def _joined(parts: list[tuple[Part, Array]], buffers: Buffers) -> Array:
    if len(parts) == 1:
        return parts[0][1]
    first, bits = parts[0][0].first, parts[0][1]
    joined = buffers.take("joined", (parts[-1][0].stop - first, bits.shape[1]), bits.dtype)
    for part, rows in parts:
        joined[part.first - first : part.stop - first] = rows
    return joined
