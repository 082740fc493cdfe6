"""Parts of a quantized source in the spelling of a target, a few rows at a time; must never code a value anew.

No bad number leaves: a code that is NaN, a scale that is not finite, negative or zero raises SourceError. One zero is
let through: an E4M3 scale of a block under a scale of its weight (NVFP4). Writers without a floor round the scales of
tiny blocks to it, everybody multiplies by them, and so the block is zeros for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from bridge.budget import PIECE, coded_whole
from bridge.dtypes import DTYPES, to_float32
from bridge.errors import SourceError
from bridge.planning import Output, Step
from bridge.quant.bits import Array, cast, check_fits, transpose_into
from bridge.quant.blocks import packing
from bridge.quant.compare import UNIT
from bridge.quant.decode import values
from bridge.quant.dequantize import cells_of, code_rows, prescale, scale_rows
from bridge.quant.snapped import snapped
from bridge.quant.stored import OTHERWISE, StoredScheme, spans
from bridge.quant.transcode import packed_codes
from bridge.values import LazyTensor, Slice

if TYPE_CHECKING:
    from bridge.conversion import Conversion
    from bridge.making import Emit
    from bridge.sources.stored import Stored, Taken

E4M3_NAN = np.uint8(0x7F)  # with either sign
REPAIR = "repair the checkpoint, or download it again; quant='none' refuses it as well"


def carrier_of(conversion: Conversion) -> Carrier | None:
    """The carrier of a conversion that takes a quantized source as it is, None for all others."""
    found = conversion.source.quantized
    return Carrier(found.taken) if found and isinstance(conversion.scheme, StoredScheme) else None


class Carrier:
    """Makes the outputs of steps whose weight the source holds as codes."""

    def __init__(self, taken: Taken) -> None:
        self._taken = taken

    def make(self, step: Step, outputs: Mapping[str, Output], emit: Emit) -> None:
        """Emit every output of a step."""
        if step.attention:
            for part, value in self._kv_scales(step, outputs).items():
                emit(outputs[part], value, 0)
            return
        members = self._members(step)
        for part, constant in self.constants(step).items():
            emit(outputs[part], constant, 0)
        codes, scale = outputs["weight"], outputs.get("scale")
        if coded_whole(step):
            (only,) = members
            emit(codes, _turned_codes(step, *only), 0)
            if scale and scale.spec.shape:
                emit(scale, _turned_scale(scale, *only), 0)
            return
        at = dict.fromkeys(outputs, 0)
        for part, array in _rows(step, members, scale):
            emit(outputs[part], array, at[part])
            at[part] += array.nbytes

    def constants(self, step: Step) -> dict[str, Array]:
        """The parts of a step that do not come by rows."""
        return _constants(step, self._members(step), {output.part: output for output in step.outputs})

    def _members(self, step: Step) -> list[tuple[Slice, Stored]]:
        assert step.site
        return [(part, self._taken.stored[part.module or step.site.module]) for part in step.inputs]

    def _kv_scales(self, step: Step, outputs: Mapping[str, Output]) -> dict[str, Array]:
        found = {}
        for part, lazy in self._taken.attention[step.attention].items():
            value = to_float32(lazy.read(), lazy.spec.dtype).reshape(())
            found[part] = np.maximum(_sound(value, lazy, OTHERWISE), np.float32(step.coding.least))
        found["kv_scale"] = np.maximum(found["k_scale"], found["v_scale"])
        return {part: cast(np.asarray(found[part]), "float32", output.spec.dtype) for part, output in outputs.items()}


def _rows(step: Step, members: list[tuple[Slice, Stored]], scale: Output | None) -> Iterator[tuple[str, Array]]:
    """Codes and scales piece by piece, in the order of the step's rows."""
    assert step.format
    first = step.format.weight[0]
    packed = packing(first, "out_in", False, step.coding)
    for part, stored in members:
        cells = cells_of(stored)
        for at, codes, grid in _pieces(part, stored):
            if step.coding.values:
                yield "weight", _snapped(codes, grid, stored, step.coding.values)
            else:
                yield "weight", packed_codes(codes, first.dtype, packed)
            if scale is None or first.per == "tensor" or (cells.down >= cells.rows and at):
                continue
            yield "scale", _spelled(grid, scale, stored)


def _pieces(part: Slice, stored: Stored) -> Iterator[tuple[int, Array, Array]]:
    """Yield (first row, codes of one byte each, their grid of scales), about `PIECE` codes at a time."""
    cells = cells_of(stored)
    (begin, end), (left, right) = spans(part, stored)
    down = cells.down if cells.down < cells.rows else 1
    unit = math.lcm(down, 2)
    pieces = max(PIECE // max(cells.cols, 1) // unit, 1) * unit
    constant = _scales(stored, 0, 1) if cells.down >= cells.rows else None
    for a in range(begin, end, pieces):
        b = min(a + pieces, end)
        codes = np.ascontiguousarray(_codes(stored, a, b)[:, left:right])
        grid = _scales(stored, a // down, -(-b // down)) if constant is None else constant
        yield a - begin, codes, grid[:, left // cells.across : -(-right // cells.across)]


def _snapped(codes: Array, grid: Array, stored: Stored, dtype: str) -> Array:
    """What codes stand for under scales that are stored in `dtype`; SourceError where it holds those with few bits."""
    cells = cells_of(stored)
    kept = to_float32(cast(np.ascontiguousarray(grid), "float32", dtype), dtype)
    if (np.abs(kept - grid) > grid * UNIT[dtype]).any():
        raise SourceError(
            f"{stored.parts['scale'].spec.name}: has scales, the least {grid.min():g}, that {dtype} does not resolve; "
            "choose another dtype (--dtype)"
        )
    made = snapped(codes, stored.format.weight[0], kept, min(cells.down, len(codes)), cells.across, dtype)
    check_fits(made, dtype, stored.module)
    return made


def _turned_codes(step: Step, part: Slice, stored: Stored) -> Array:
    """All codes as [in, out], two to a byte along `out`; or their values. Only the result is held whole."""
    rows, cols = (stop - start for start, stop in spans(part, stored))
    out = np.empty((cols, rows), DTYPES[step.coding.values].storage if step.coding.values else np.uint8)
    word = f"u{out.itemsize}"
    for at, codes, grid in _pieces(part, stored):
        made = _snapped(codes, grid, stored, step.coding.values) if step.coding.values else codes
        transpose_into(made.view(word), 0, out.view(word), at, *made.shape)
    return out if step.coding.values else packed_codes(out, stored.format.weight[0].dtype, "in")


def _turned_scale(output: Output, part: Slice, stored: Stored) -> Array:
    """All scales as [in / block, out]; tiles, which the target knows along one axis only, repeat along `out`."""
    cells = cells_of(stored)
    grid = _scales(stored, 0, cells.shape[0])
    if cells.down > 1:
        grid = grid.repeat(cells.down, axis=0)[: cells.rows]
    rows, (left, right) = spans(part, stored)
    return _spelled(grid[slice(*rows), left // cells.across : -(-right // cells.across)].T, output, stored)


def _codes(stored: Stored, begin: int, end: int) -> Array:
    """Rows of codes, one byte each; SourceError where one is NaN."""
    codes = code_rows(stored, begin, end)
    if stored.format.weight[0].dtype == "float8_e4m3fn" and ((codes & E4M3_NAN).max(initial=0) == E4M3_NAN):
        rows, cols = np.nonzero((codes & E4M3_NAN) == E4M3_NAN)
        raise SourceError(
            f"{stored.parts['codes'].spec.name}: {rows.size} codes of rows {begin} to {end} are NaN, the first at "
            f"({begin + rows[0]}, {cols[0]}); {REPAIR}"
        )
    return codes


def _scales(stored: Stored, begin: int, end: int) -> Array:
    """Rows of the grid of scales, see `scale_rows`; SourceError where one is no scale."""
    grid, kind = scale_rows(stored, begin, end), stored.format.weight[0].scale_dtype
    _sound(grid if stored.scale_is_float else values(grid, kind), stored.parts["scale"], zero=kind == "float8_e4m3fn")
    return grid


def _sound(scale: Array, of: LazyTensor, remedy: str = REPAIR, *, zero: bool = False) -> Array:
    """Return float32 scales; SourceError where one is not finite, negative or, unless that is allowed, zero.

    remedy: where one is not finite; dequantizing a weight needs no more than that.
    """
    sound = np.isfinite(scale) & ((scale >= 0) if zero else (scale > 0))
    if not sound.all():
        bad = scale[~sound].reshape(-1)
        raise SourceError(
            f"{of.spec.name}: holds {bad.size} scales that are not finite and above zero, {bad[0]:g} first; "
            + (OTHERWISE if np.isfinite(bad).all() else remedy)
        )
    return scale


def _spelled(grid: Array, output: Output, stored: Stored) -> Array:
    """Scales in the dtype of the output, which holds them exactly; bits of e4m3 and e8m0 as they are."""
    grid = np.ascontiguousarray(grid)
    return cast(grid, "float32", output.spec.dtype) if stored.scale_is_float else grid


def _constants(step: Step, members: list[tuple[Slice, Stored]], outputs: Mapping[str, Output]) -> dict[str, Array]:
    """The parts that do not come by rows."""
    assert step.format
    part, stored = members[0]
    found: dict[str, Array] = {}
    if step.format.weight[0].per == "tensor":
        found["scale"] = _number(stored, "scale")
    if "scale_2" in outputs:
        above = _number(stored, "scale_2")  # as it is stored, or inverted once
        inverted = above if stored.reciprocal == step.coding.reciprocal else np.float32(1) / above
        found["scale_2"] = _sound(np.asarray(inverted), stored.parts["scale_2"])
    if "input_scale" in outputs:
        found["input_scale"] = _input_scale(step, [member for _, member in members])
    if "pre_quant_scale" in outputs:
        before = prescale(stored)
        assert before is not None
        found["pre_quant_scale"] = _sound(before[0, slice(*spans(part, stored)[1])], stored.parts["pre_quant_scale"])
    cast_ = {p: cast(np.ascontiguousarray(value), "float32", outputs[p].spec.dtype) for p, value in found.items()}
    if "shape" in outputs:
        rows = [spans(*member)[0] for member in members]
        left, right = spans(part, stored)[1]
        cast_["shape"] = np.array([sum(b - a for a, b in rows), right - left], np.int64)
    return cast_


def _input_scale(step: Step, members: list[Stored]) -> Array:
    """The scale of the largest input, as the target wants it: NVFP4's may be stored as 1 / scale on either side."""
    assert step.format and step.format.input
    inverse = step.format.input.dynamic and members[0].reciprocal
    value = (min if inverse else max)(_number(stored, "input_scale", OTHERWISE) for stored in members)
    wanted = step.format.input.dynamic and step.coding.reciprocal
    value = np.asarray(np.float32(1) / value if inverse != wanted else value)
    return _sound(value, members[0].parts["input_scale"], OTHERWISE)


def _number(stored: Stored, part: str, remedy: str = REPAIR) -> Array:
    return _sound(np.asarray(stored.number(part)), stored.parts[part], remedy)
