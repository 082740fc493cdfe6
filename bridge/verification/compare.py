"""Compare the written weight of one step with its source.

Only the plan is known of the conversion. Weights are compared in pieces of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.dtypes import to_float32
from bridge.core.values import Numeric
from bridge.planning.memory import extent
from bridge.planning.plan import Layout, Step
from bridge.quant.codec.arrays import Array, amax, cast, matrix, smooth, transposed
from bridge.quant.codec.blocks import grid, packing
from bridge.quant.codec.clip import Clip
from bridge.quant.codec.decode import values
from bridge.quant.codec.encode import CalibratedCodes
from bridge.quant.codec.packing import unpacked_codes, words_by_row
from bridge.quant.codec.search import searched_scales
from bridge.quant.codec.zero_points import stored_points
from bridge.quant.smoothing import Smoothing, multiplied
from bridge.sources.source import Source, lazy
from bridge.streaming.experts import PARTS, expert
from bridge.streaming.rows import Rows, join
from bridge.streaming.written import OutputReader
from bridge.verification.expected import ExpectedScales
from bridge.verification.weight_error import Comparer, ErrorSums, StoredCodes, Tolerance, compare
from bridge.verification.zero_points import StoredPoints, zero_point_sums

ROUNDINGS = 4  # the weight is smoothed, then again by the group's mean; the mean and its stored value are rounded


@dataclass(frozen=True)
class Searched:
    """How the scales of a weight were searched: with which importance, and what they were multiplied by then."""

    importance: Array | None = None
    clip: Clip | None = None


def compare_step(
    step: Step, source: Source, output: OutputReader, scales: ExpectedScales, buffers: Buffers
) -> ErrorSums:
    """Compare a quantized weight with its source."""
    if step.format and step.format.weight[0].zero_points:
        return _compare_zero_points(step, source, output, scales, buffers)
    match step.layout:
        case Layout.ROWS:
            return _compare_rows(step, source, output, scales, buffers)
        case Layout.WHOLE:
            return _compare_whole(step, source, output, scales, buffers)
        case Layout.EXPERTS:
            return _compare_experts(step, source, output, scales, buffers)
        case Layout.SCALES | Layout.PLAIN:
            raise AssertionError(f"{step.source} is not a quantized weight")


def equal_bytes(one: Array, other: Array) -> bool:
    """Whether two C-contiguous arrays hold the same bytes, read eight at a time."""
    a, b = (array.reshape(-1).view(np.uint8) for array in (one, other))
    whole = a.size // 8 * 8
    return np.array_equal(a[whole:], b[whole:]) and np.array_equal(a[:whole].view(np.uint64), b[:whole].view(np.uint64))


def _compare_rows(
    step: Step, source: Source, output: OutputReader, scales: ExpectedScales, buffers: Buffers
) -> ErrorSums:
    """Compare a weight whose stored rows follow its source's, in pieces; nothing is held whole."""
    assert step.format and step.site
    rows = Rows(step, source, buffers)
    outputs = {output.part: output for output in step.outputs}
    numeric, above = step.format.weight, outputs.get("scale_2")
    blocks = grid(numeric[0], (rows.rows, rows.cols), "out_in", step.source)
    packed = packing(numeric[0], "out_in", False, step.coding)
    smoother = _smoother(step, rows.spec.dtype, source, output, scales)
    tolerance = _tolerance(step, smoother, scales)
    second, chosen = output.read(above) if above else None, scales.chosen(step, source)
    kind = StoredCodes(numeric, blocks, packed, step.coding, second)
    comparer = Comparer(kind, rows.spec.dtype, tolerance, take=buffers.take)
    of_chosen = Comparer(kind, "float32", tolerance, take=buffers.take)
    down, codes, scale = blocks.down if blocks.down < blocks.rows else 0, outputs["weight"], outputs.get("scale")
    clip = scales.clip(step)
    every = np.empty(0, np.uint8) if scale is None else None if down else output.read(scale)  # none beside the codes
    biases, total = outputs.get("bias"), ErrorSums()
    for first, parts in rows.pieces(math.lcm(down or 1, 2)):
        stop = parts[-1].stop
        stored = output.rows(codes, first, stop, rows.rows, buffers)
        stored = stored.reshape(-1, codes.spec.nbytes // (rows.rows // 2 if packed == "out" else rows.rows))
        factor = every
        if factor is None:
            assert scale
            factor = output.rows(scale, first // down, -(-stop // down), blocks.shape[0], buffers)
        bias = output.rows(biases, first, stop, rows.rows, buffers) if biases else None
        if step.format.weighted:
            for part in parts:
                begin, end = part.first - first, part.stop - first
                own = factor.reshape(stop - first, -1)[begin:end] if scale else factor
                coded = stored[begin // 2 : -(-end // 2)] if packed == "out" else stored[begin:end]
                importance = scales.importance(step, part.slice)
                of_part = None if bias is None else bias.reshape(stop - first, -1)[begin:end]
                factors = None if clip is None else clip.rows(part.first, part.stop)
                sums = comparer.rows(part.bits, coded, own, importance, of_part, factors)
                if step.format.ordered and not scales.copies(step):
                    others = 0
                    if chosen is not None and importance is not None:
                        taken = chosen.rows(first, stop).cut(slice(begin, end), across=False)
                        searched = Searched(importance, factors)
                        value = _chosen_values(part.bits, rows.spec.dtype, taken, numeric[0], "out_in", 1.0, searched)
                        others = of_chosen.rows(value, coded, own, bias=of_part).not_nearest
                    sums = replace(sums, not_nearest=others)
                total += sums
            continue
        bits = join([(part, smoother(part.slice.module, part.bits, part.first)) for part in parts], buffers)
        sums = comparer.rows(bits, stored, factor, bias=bias)
        if step.format.compensated and not scales.copies(step):
            others = 0  # codes that are not those that were chosen, if a calibration says which were
            if chosen is not None:
                taken, whole = chosen.rows(first, stop), scales.above(step)
                value = _chosen_values(bits, rows.spec.dtype, taken, numeric[0], "out_in", whole)
                others = of_chosen.rows(value, stored, factor, bias=bias).not_nearest
            sums = replace(sums, not_nearest=others)
        total += sums
    return total


def _compare_whole(
    step: Step, source: Source, output: OutputReader, scales: ExpectedScales, buffers: Buffers
) -> ErrorSums:
    """Compare a weight that is stored across its source's rows."""
    assert step.site and step.format
    layout = step.site.layout
    rows = Rows(step, source, buffers)
    arrays = {("codes" if o.part == "weight" else o.part): output.read(o) for o in step.outputs}
    smoother = _smoother(step, rows.spec.dtype, source, output, scales)
    bits = rows.whole(lambda part: smoother(part.slice.module, part.bits, part.first, layout))
    block = step.format.weight[0].block
    if len(block) == 2:  # written once per `out`, see `streaming.encode.encode_whole`
        arrays["scale"] = arrays["scale"][:, :: block[0]]
    weights = step.format.weight
    tolerance = _tolerance(step, smoother, scales)

    def sums_of(weight: Array, dtype: str, searched: Searched = Searched()) -> ErrorSums:
        return compare(
            weight, dtype, arrays, weights, layout=layout, transpose=step.transpose, coding=step.coding,
            tolerance=tolerance, importance=searched.importance, clip=searched.clip,
        )  # fmt: skip

    searched = Searched(scales.importance_of_all(step), scales.clip(step))
    sums = sums_of(bits, rows.spec.dtype, searched)
    if not step.format.compensated or scales.copies(step):
        return sums
    chosen = scales.chosen(step, source)
    if chosen is None:
        return replace(sums, not_nearest=0)
    value = _chosen_values(bits, rows.spec.dtype, chosen.whole(), weights[0], layout, scales.above(step), searched)
    return replace(sums, not_nearest=sums_of(value, "float32").not_nearest)


def _compare_zero_points(
    step: Step, source: Source, output: OutputReader, scales: ExpectedScales, buffers: Buffers
) -> ErrorSums:
    """Compare a weight whose blocks have zero points, which is held whole."""
    assert step.format
    first, packed = step.format.weight[0], step.coding.packed
    rows = Rows(step, source, buffers)
    smoother = _smoother(step, rows.spec.dtype, source, output, scales)
    bits = rows.whole(lambda part: smoother(part.slice.module, part.bits, part.first))
    arrays = {o.part: output.read(o) for o in step.outputs}
    scale = to_float32(arrays["scale"], step.coding.scale_dtype)
    words = arrays["weight"]
    if packed == "awq":
        words, scale = words_by_row(words, first.dtype, packed), transposed(scale)
    codes = unpacked_codes(np.ascontiguousarray(words), first.dtype, "int32", rows.cols)
    stored = StoredPoints(codes, np.ascontiguousarray(scale), stored_points(arrays["zeros"], first.dtype, packed))
    return zero_point_sums(
        to_float32(bits, rows.spec.dtype), stored, first, step.coding, rows.spec.dtype, smoother.roundings
    )


def _tolerance(step: Step, smoother: _Smoother, scales: ExpectedScales) -> Tolerance:
    assert step.format
    return Tolerance(smoother.roundings, step.format.clipped or step.format.rescaled, scales.copies(step))


def _chosen_values(
    bits: Array,
    dtype: str,
    chosen: CalibratedCodes,
    numeric: Numeric,
    layout: str,
    above: float,
    searched: Searched = Searched(),
) -> Array:
    """Return the float32 values of chosen codes under the scales that were chosen, or that a weight's maxima give.

    bits: some rows of the weight, or all of it; codes have the same axes.  above: the scale above chosen scales.
    """
    assert chosen.codes is not None
    flat = transposed(matrix(bits)) if layout == "in_out" else matrix(bits)
    if searched.importance is not None:
        scale = searched_scales(flat, dtype, numeric, searched.importance)
        scale = scale if searched.clip is None else searched.clip.amax(scale)
    elif chosen.scales is None:
        scale = amax(flat, dtype, 1, numeric.block[0]) / np.float32(numeric.maxbound)
    else:
        scale = values(np.ascontiguousarray(chosen.scales), numeric.scale_dtype) * np.float32(above)
    own = np.ascontiguousarray(chosen.codes)
    found = values(transposed(own) if layout == "in_out" else own, numeric.dtype, scale, 1, numeric.block[0])
    return transposed(found) if layout == "in_out" else found


def _compare_experts(
    step: Step, source: Source, output: OutputReader, scales: ExpectedScales, buffers: Buffers
) -> ErrorSums:
    assert step.format
    spec, total = source.specs[step.source], ErrorSums()
    outputs = {output.part: output for output in step.outputs}
    arrays = {"scale_2": output.read(outputs["scale_2"])}
    for number in range(spec.shape[0]):
        for key, part in PARTS.items():
            stored = output.rows(outputs[part], number, number + 1, spec.shape[0], buffers)
            arrays[key] = transposed(stored.reshape(outputs[part].spec.shape[1:]))
        bits = expert(step, source, number)
        importance = scales.importance(step, replace(step.inputs[0], expert=number))
        weight, tolerance = step.format.weight, Tolerance(beyond=step.format.rescaled)
        sums = compare(bits, spec.dtype, arrays, weight, coding=step.coding, tolerance=tolerance, importance=importance)
        if step.format.compensated and not scales.copies(step):
            chosen, others = scales.expert(step, source, number), 0
            if chosen is not None:
                searched = Searched(importance)
                value = _chosen_values(bits, spec.dtype, chosen, weight[0], "out_in", scales.above(step), searched)
                others = compare(value, "float32", arrays, weight, coding=step.coding, tolerance=tolerance).not_nearest
            sums = replace(sums, not_nearest=others)
        total += sums
    return total


@dataclass(frozen=True)
class _Smoother:
    """Divides rows by their pre-scale: bit-exact if a calibration has it, else by the written one.

    `factor`: of each row, that of another matrix's pre-scale. `roundings`: how often the written values may have been
    rounded differently.
    """

    dtype: str
    smoothing: Smoothing | None
    scale: Array | None
    roundings: float
    factor: Array | None = None

    def __call__(self, module: str, bits: Array, first: int = 0, layout: str = "out_in") -> Array:
        factor = None if self.factor is None else self.factor[first : first + len(bits)]
        if self.smoothing:
            return self.smoothing.apply(module, bits, layout, factor)
        bits = bits if factor is None else multiplied(bits, self.dtype, factor)
        return bits if self.scale is None else smooth(bits, self.dtype, self.scale, layout=layout)


def _smoother(step: Step, dtype: str, source: Source, output: OutputReader, scales: ExpectedScales) -> _Smoother:
    smoothing = scales.smoothing(step)
    scale = None if smoothing else _written_pre_scale(step, source, output, scales)
    roundings = 0.0 if scale is None else ROUNDINGS
    if scale is not None and not any(o.part == "pre_quant_scale" for o in step.outputs):
        roundings = math.inf  # a pre-scale that was folded into a norm is lost where the norm is zero
    factor = scales.row_factor(step, extent(step.inputs[0], source.specs)[0])
    return _Smoother(dtype, smoothing, scale, roundings + scales.copies(step), factor)


def _written_pre_scale(step: Step, source: Source, output: OutputReader, scales: ExpectedScales) -> Array | None:
    """The factor of the input, float32 (in,), from the written files: stored, or multiplied into the norm."""
    stored = next((o for o in step.outputs if o.part == "pre_quant_scale"), None)
    if stored:
        return cast(output.read(stored), stored.spec.dtype, "float32")
    norm = scales.norms.get(step.unified[0]) if step.unified else None
    if norm is None:
        return None
    spec, written = source.specs[norm.source], norm.outputs[0]
    before = to_float32(lazy(source, norm.source).read(), spec.dtype) + np.float32(norm.plus_one)
    after = to_float32(output.read(written), written.spec.dtype) + np.float32(norm.plus_one)
    return np.divide(after, before, out=np.ones_like(after), where=before != 0)
