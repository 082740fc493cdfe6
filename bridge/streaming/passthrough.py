"""Copy codes and scales of a quantized source into the target's layout.

It never quantizes again. A code that is NaN and a scale that is not finite, negative or zero raise SourceError, with
two exceptions. The E4M3 scale of a block under a scale of its weight (NVFP4) may be zero: writers without a floor round
the scales of tiny blocks to zero, and every reader multiplies by them, so that the block is zeros everywhere. A scale
of integers may be negative, as half of AutoRound's are, where readers of the layout take that (`Encoding.signed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from bridge.core.dtypes import DTYPES, UNIT, to_float32
from bridge.core.errors import SourceError
from bridge.core.text import number
from bridge.core.values import LazyTensor, Slice
from bridge.planning.memory import PIECE
from bridge.planning.passthrough import REMEDY, spans
from bridge.planning.plan import Layout, Output, Step
from bridge.quant.codec.arrays import Array, cast, check_fits, transpose_into
from bridge.quant.codec.blocks import packing
from bridge.quant.codec.decode import values
from bridge.quant.codec.fake_quant import fake_quantized
from bridge.quant.codec.packing import packed_codes
from bridge.sources.quantized.dequantize import cells_of, code_rows, prescale, scale_rows
from bridge.sources.quantized.parts import QuantizedTensors, QuantizedWeight
from bridge.sources.source import Source
from bridge.streaming.context import Sink

E4M3_NAN = np.uint8(0x7F)  # with either sign
REPAIR = "repair the checkpoint, or get it again; quant='none' refuses it as well"


def copy_step(step: Step, source: Source, sink: Sink) -> None:
    """Write every output of a step whose weight, or whose K and V scales, the source holds quantized."""
    assert source.quantized
    tensors, outputs = source.quantized.tensors, {output.part: output for output in step.outputs}
    for part, constant in copied_constants(step, tensors).items():
        sink(outputs[part], constant, 0)
    if step.layout is Layout.SCALES:
        return
    members, codes, scale = _members(step, tensors), outputs["weight"], outputs.get("scale")
    if step.layout is Layout.WHOLE:
        sink(codes, _turned_codes(step, members), 0)
        if scale and scale.spec.shape:
            turned = [_turned_scale(scale, *member, step.coding.signed) for member in members]
            sink(scale, np.concatenate(turned, axis=-1), 0)
        return
    at = dict.fromkeys(outputs, 0)
    for part, array in _rows(step, members, scale):
        sink(outputs[part], array, at[part])
        at[part] += array.nbytes


def copied_constants(step: Step, tensors: QuantizedTensors) -> dict[str, Array]:
    """The parts of a step that do not come by rows."""
    return _kv_scales(step, tensors) if step.layout is Layout.SCALES else _constants(step, _members(step, tensors))


def _members(step: Step, tensors: QuantizedTensors) -> list[tuple[Slice, QuantizedWeight]]:
    assert step.site
    return [(part, tensors.stored[part.module or step.site.module]) for part in step.inputs]


def _kv_scales(step: Step, tensors: QuantizedTensors) -> dict[str, Array]:
    scales = {}
    for part, lazy in tensors.attention[step.attention].items():
        value = to_float32(lazy.read(), lazy.spec.dtype).reshape(())
        scales[part] = np.maximum(_sound(value, lazy, REMEDY), np.float32(step.coding.least))
    scales["kv_scale"] = np.maximum(scales["k_scale"], scales["v_scale"])
    return {output.part: cast(np.asarray(scales[output.part]), "float32", output.spec.dtype) for output in step.outputs}


def _rows(
    step: Step, members: list[tuple[Slice, QuantizedWeight]], scale: Output | None
) -> Iterator[tuple[str, Array]]:
    """Codes and scales piece by piece, in the order of the step's rows."""
    assert step.format
    first = step.format.weight[0]
    packed = packing(first, "out_in", False, step.coding)
    for part, stored in members:
        cells = cells_of(stored)
        for at, codes, grid in _pieces(part, stored, step.coding.signed):
            if step.coding.values:
                yield "weight", _fake_quantized(codes, grid, stored, step.coding.values)
            else:
                yield "weight", packed_codes(codes, first.dtype, packed)
            if scale is None or first.per == "tensor" or (cells.down >= cells.rows and at):
                continue
            yield "scale", _stored_scales(grid, scale, stored)


def _pieces(part: Slice, stored: QuantizedWeight, signed: bool) -> Iterator[tuple[int, Array, Array]]:
    """Yield (first row, codes of one byte each, their grid of scales), about `PIECE` codes at a time."""
    cells = cells_of(stored)
    (begin, end), (left, right) = spans(part, stored)
    down = cells.down if cells.down < cells.rows else 1
    unit = math.lcm(down, 2)
    pieces = max(PIECE // max(cells.cols, 1) // unit, 1) * unit
    constant = _scales(stored, 0, 1, signed) if cells.down >= cells.rows else None
    for a in range(begin, end, pieces):
        b = min(a + pieces, end)
        codes = np.ascontiguousarray(_codes(stored, a, b)[:, left:right])
        grid = _scales(stored, a // down, -(-b // down), signed) if constant is None else constant
        yield a - begin, codes, grid[:, left // cells.across : -(-right // cells.across)]


def _fake_quantized(codes: Array, grid: Array, stored: QuantizedWeight, dtype: str) -> Array:
    """Values of codes under scales that are stored in `dtype`; SourceError if these scales are subnormal in it."""
    cells = cells_of(stored)
    scales = to_float32(cast(np.ascontiguousarray(grid), "float32", dtype), dtype)
    if (np.abs(scales - grid) > grid * UNIT[dtype]).any():
        raise SourceError(
            f"{stored.parts['scale'].spec.name}: has scales, the least {grid.min():g}, that {dtype} does not resolve; "
            "choose another dtype (--dtype)"
        )
    weights = fake_quantized(codes, stored.format.weight[0], scales, min(cells.down, len(codes)), cells.across, dtype)
    check_fits(weights, dtype, stored.module)
    return weights


def _turned_codes(step: Step, members: list[tuple[Slice, QuantizedWeight]]) -> Array:
    """All codes as [in, out], two per byte along `out`; or their values. Only the result is held whole."""
    assert step.format
    extents = [tuple(stop - start for start, stop in spans(*member)) for member in members]
    shape = extents[0][1], sum(rows for rows, _ in extents)
    out = np.empty(shape, DTYPES[step.coding.values].storage if step.coding.values else np.uint8)
    word, first = f"u{out.itemsize}", 0
    for (part, stored), (rows, _) in zip(members, extents, strict=True):
        for at, codes, grid in _pieces(part, stored, step.coding.signed):
            piece = _fake_quantized(codes, grid, stored, step.coding.values) if step.coding.values else codes
            transpose_into(piece.view(word), 0, out.view(word), first + at, *piece.shape)
        first += rows
    return out if step.coding.values else packed_codes(out, step.format.weight[0].dtype, "in")


def _turned_scale(output: Output, part: Slice, stored: QuantizedWeight, signed: bool) -> Array:
    """All scales as [in / block, out]; a tile's scale repeats along `out`, for targets whose blocks have one axis."""
    cells = cells_of(stored)
    grid = _scales(stored, 0, cells.shape[0], signed)
    if cells.down > 1:
        grid = grid.repeat(cells.down, axis=0)[: cells.rows]
    rows, (left, right) = spans(part, stored)
    return _stored_scales(grid[slice(*rows), left // cells.across : -(-right // cells.across)].T, output, stored)


def _codes(stored: QuantizedWeight, begin: int, end: int) -> Array:
    """Rows of codes, one byte each; SourceError if one is NaN."""
    codes = code_rows(stored, begin, end)
    if stored.format.weight[0].dtype == "float8_e4m3fn" and ((codes & E4M3_NAN).max(initial=0) == E4M3_NAN):
        rows, cols = np.nonzero((codes & E4M3_NAN) == E4M3_NAN)
        more = f", and {number(rows.size - 1, 'other code')} near it" if rows.size > 1 else ""
        raise SourceError(
            f"{stored.parts['codes'].spec.name}: row {begin + rows[0]} holds a NaN at column {cols[0]}{more}; {REPAIR}"
        )
    return codes


def _scales(stored: QuantizedWeight, begin: int, end: int, signed: bool) -> Array:
    """Rows of the grid of scales, see `scale_rows`; SourceError if one is not a valid scale.  signed: negative is."""
    grid, kind = scale_rows(stored, begin, end), stored.format.weight[0].scale_dtype
    scales, of = grid if stored.scale_is_float else values(grid, kind), stored.parts["scale"]
    if stored.coding.signed and not signed and (scales < 0).any():
        raise SourceError(
            f"{of.spec.name}: {number(int((scales < 0).sum()), 'scale')} below zero, which no program reads in this "
            f"layout; write compressed-tensors (--target hf --format compressed-tensors), or {REMEDY}"
        )
    _sound(np.abs(scales) if signed else scales, of, zero=kind == "float8_e4m3fn")
    return grid


def _sound(scale: Array, of: LazyTensor, remedy: str = REPAIR, *, zero: bool = False) -> Array:
    """Return float32 scales; SourceError if one is not finite, negative or, unless that is allowed, zero.

    remedy: for scales that are not finite or negative; dequantizing a weight takes zero.
    """
    sound = np.isfinite(scale) & ((scale >= 0) if zero else (scale > 0))
    if not sound.all():
        bad = scale[~sound].reshape(-1)
        raise SourceError(
            f"{of.spec.name}: holds {number(bad.size, 'scale')} not finite and above zero, {bad[0]:g} first; "
            + (REMEDY if (bad == 0).all() else remedy)
        )
    return scale


def _stored_scales(grid: Array, output: Output, stored: QuantizedWeight) -> Array:
    """Scales in the dtype of the output, which holds them exactly; bits of e4m3 and e8m0 unchanged."""
    grid = np.ascontiguousarray(grid)
    return cast(grid, "float32", output.spec.dtype) if stored.scale_is_float else grid


def _constants(step: Step, members: list[tuple[Slice, QuantizedWeight]]) -> dict[str, Array]:
    assert step.format
    outputs = {output.part: output for output in step.outputs}
    part, stored = members[0]
    constants: dict[str, Array] = {}
    if step.format.weight[0].per == "tensor":
        constants["scale"] = _number(stored, "scale")
    if "scale_2" in outputs:
        above = _number(stored, "scale_2")  # as it is stored, or inverted once
        inverted = above if stored.reciprocal == step.coding.reciprocal else np.float32(1) / above
        constants["scale_2"] = _sound(np.asarray(inverted), stored.parts["scale_2"])
    if "input_scale" in outputs:
        constants["input_scale"] = _input_scale(step, [member for _, member in members])
    if "pre_quant_scale" in outputs:
        before = prescale(stored)
        assert before is not None
        constants["pre_quant_scale"] = _sound(
            before[0, slice(*spans(part, stored)[1])], stored.parts["pre_quant_scale"]
        )
    arrays = {p: cast(np.ascontiguousarray(value), "float32", outputs[p].spec.dtype) for p, value in constants.items()}
    if "shape" in outputs:
        rows = [spans(*member)[0] for member in members]
        left, right = spans(part, stored)[1]
        arrays["shape"] = np.array([sum(b - a for a, b in rows), right - left], np.int64)
    return arrays


def _input_scale(step: Step, members: list[QuantizedWeight]) -> Array:
    """The scale of the largest input; NVFP4's may be stored as 1 / scale by the source, by the target, or by both."""
    assert step.format and step.format.input
    inverse = step.format.input.dynamic and members[0].reciprocal
    value = (min if inverse else max)(_number(stored, "input_scale", REMEDY) for stored in members)
    wanted = step.format.input.dynamic and step.coding.reciprocal
    value = np.asarray(np.float32(1) / value if inverse != wanted else value)
    return _sound(value, members[0].parts["input_scale"], REMEDY)


def _number(stored: QuantizedWeight, part: str, remedy: str = REPAIR) -> Array:
    return _sound(np.asarray(stored.number(part)), stored.parts[part], remedy)
