"""Give fused NVFP4 matrices one scale above their block scales.

The group takes its largest, so that no block scale grows. Block scales are rounded to FP8 again; codes change only in
blocks whose scale becomes subnormal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from bridge.core.dtypes import DTYPES, from_float32
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.decode import values
from bridge.quant.codec.fake_quant import runtime_codes
from bridge.quant.codec.packing import packed_codes
from bridge.quant.codec.scales import e4m3_codes
from bridge.sources.quantized.dequantize import cells_of, code_rows, scale_rows, weight_rows
from bridge.sources.quantized.parts import QuantizedWeight

E4M3 = "float8_e4m3fn"
EXACT = 15  # a scale that moved by less than this part of it leaves every code next to its value
VALUES = 1 << 20  # of a weight that are held at once, in float32 some times


@dataclasses.dataclass(frozen=True)
class Rescaled:
    """A weight that gets another scale above its block scales, `above`, as it is stored."""

    weight: QuantizedWeight
    above: np.float32

    def rows(self, part: str) -> Iterator[Array]:
        """The storage of "codes", "scale" or "scale_2", some rows at a time."""
        weight = self.weight
        if part == "scale_2":
            spec = weight.parts["scale_2"].spec
            yield from_float32(np.full(spec.shape, self.above, np.float32), spec.dtype)
            return
        across, dtype = cells_of(weight).across, weight.format.weight[0].dtype
        for begin, end in pieces(weight):
            bits = scale_rows(weight, begin, end)
            before = self._factor(values(bits, E4M3), weight.number("scale_2"))
            after_bits = np.where(bits & 0x7F, e4m3_codes(before / self._factor(np.float32(1), self.above)), bits)
            if part == "scale":
                yield np.ascontiguousarray(after_bits, np.uint8)
                continue
            after = self._factor(values(np.ascontiguousarray(after_bits, np.uint8), E4M3), self.above)
            codes = code_rows(weight, begin, end)
            moved = np.repeat(np.abs(before - after) > np.abs(before) / EXACT, across, 1)
            if moved.any():
                numbers = values(codes, dtype, before, 1, across)
                after[after == 0] = 1  # of blocks of zeros
                again = runtime_codes(numbers, "float32", weight.format.weight[0], after, 1, across)
                codes = np.where(moved, again, codes)
            yield packed_codes(codes, dtype, weight.coding.packed).view(
                DTYPES[weight.parts["codes"].spec.dtype].storage
            )

    def _factor(self, scale: Array | np.float32, above: np.float32) -> Array:
        return np.asarray(scale / above if self.weight.reciprocal else scale * above, np.float32)


def pieces(weight: QuantizedWeight) -> list[tuple[int, int]]:
    """Ranges of rows of at most `VALUES` values."""
    out, in_ = weight.spec.shape
    step = max(VALUES // in_, 1)
    return [(begin, min(begin + step, out)) for begin in range(0, out, step)]


def error(before: QuantizedWeight, after: QuantizedWeight) -> float:
    """The relative L2 distance of the values of two stored weights."""
    one, other = (dataclasses.replace(w, spec=dataclasses.replace(w.spec, dtype="float32")) for w in (before, after))
    apart = whole = 0.0
    for begin, end in pieces(before):
        old, new = weight_rows(one, begin, end).astype(np.float64), weight_rows(other, begin, end)
        apart, whole = apart + float(((new - old) ** 2).sum()), whole + float((old**2).sum())
    return math.sqrt(apart / whole) if whole else math.sqrt(apart)
