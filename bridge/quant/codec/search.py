"""Search the scales of blocks under which a weight changes least.

"mse" and "four_over_six" are ModelOpt's `mse_calibrate` (nvidia-modelopt 0.47, torch/quantization/model_calib.py) with
its candidates, and its rule that the first of equal ones is taken. Errors are float32 sums; where two candidates differ
in the last digits of theirs alone, another order of adding, such as that of another processor in torch, may choose the
other one. `tests/oracles/codec_reference.py` has the formulas in plain torch. "either", "positive", "weighted": ours.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.search import fp4_errors, fp4_sweep, integer_sweep, signed_scales, weighted_sweep
from bridge.core.values import BY_SIGN, FOUR_OVER_SIX, MSE, POSITIVE, Numeric
from bridge.quant.codec.arrays import Array, readable
from bridge.quant.codec.arrays import amax as amax_by_block
from bridge.quant.codec.decode import values
from bridge.quant.codec.kernels import INTEGER_RANGE, fp8_codes

# MseCalibConfig: `start_multiplier`, `stop_multiplier`, and the steps that its `step_size` of 0.1 makes.
START, STOP, STEPS = 0.25, 4.0, 39
SIX_OR_FOUR = (1.0, 1.5)  # the largest value of a block becomes a code of 6, or of 4: NVFP4_FOUR_OVER_SIX_CFG
ZERO = np.float32(2.0**-24)  # ModelOpt's quantizers take a smaller amax for zero
# Multipliers in the order of their distance to 0.94, which half of the blocks of normal values take.
LIKELY = np.array(sorted(range(STEPS), key=lambda at: abs(at - 7)))
# What is tried beside all of the range, in parts of the largest code: the largest value becomes a code of 5 to 9 of
# INT4's 8; values beyond the last code saturate. All of the range comes first: it stays where none is better. With 2
# and 3 bits more values should saturate: on normal ones in blocks of 128 the squared error of both falls by 5 %.
# tests/targets/test_searched.py
STEP, TRIED = 0.025, np.array([0, *range(-15, 0), *range(1, 6)])
TRIED_OF_FEW = np.array([*TRIED, *range(6, 26)])
E4M3_MAX, LEAST = np.float32(448), np.float32(2.0**-9)
# The codes of the scales that a block may have: of e4m3 all but 0 and NaN, of e8m0 all but NaN.
CODES = {"float8_e4m3fn": np.arange(1, 127, dtype=np.uint8), "float8_e8m0fnu": np.arange(255, dtype=np.uint8)}
SCALES = {dtype: values(codes.reshape(1, -1), dtype).reshape(-1) for dtype, codes in CODES.items()}


def multipliers() -> Array:
    """What an amax is multiplied by, as `torch.linspace` gives it: from both ends to the middle, each rounded once.

    >>> multipliers()[[0, 19, -1]].tolist()
    [0.25, 2.125, 4.0]
    """
    step = np.float64(np.float32((STOP - START) / (STEPS - 1)))
    at = np.arange(STEPS)
    low, high = START + at * step, STOP - at[::-1] * step
    return np.where(at < STEPS // 2, low, high).astype(np.float32)


def integer_amax(words: Array, amax: Array, numeric: Numeric, across: int, bound: float) -> Array:
    """The amax of each block with the least error: its own times one of `multipliers`.

    words: see `arrays.readable`.  amax: float32 (rows, blocks) of `across` values each.  bound: amax / scale.
    """
    low, high = INTEGER_RANGE[numeric.dtype]
    chosen = np.empty(amax.shape, np.float32)
    integer_sweep(words, amax, multipliers(), LIKELY, np.float32(bound), ZERO, across, low, high, chosen)
    return chosen


def searched_scales(
    bits: Array, dtype: str, numeric: Numeric, importance: Array | None, divisors: Array | None = None
) -> Array:
    """`integer_scales` of a storage array (rows, in), or the divisors of `searched_codes`.

    divisors: of all codes of FP4's scales; without them their values.
    """
    words, block = readable(bits, dtype, np.empty(bits.size, np.uint32)), numeric.block[0]
    if numeric.search in BY_SIGN:
        return integer_scales(words, numeric, block, importance)
    divisors = SCALES[numeric.scale_dtype] if divisors is None else divisors
    codes = searched_codes(words, amax_by_block(bits, dtype, 1, block), numeric, block, importance, divisors)
    return np.asarray(divisors[codes - CODES[numeric.scale_dtype][0]])


def searched_codes(
    words: Array, amax: Array, numeric: Numeric, across: int, importance: Array | None, divisors: Array
) -> Array:
    """The codes of the scales (rows, blocks) under which FP4's blocks have the least weighted error.

    importance: see `integer_scales`; without it errors have the same weight.  divisors: float32, of the scales in
    `CODES`.  Other arguments: see `integer_amax`.
    """
    weights = np.ones(words.shape[1], np.float32) if importance is None else np.ascontiguousarray(importance)
    codes = np.empty(amax.shape, np.uint8)
    fp4_sweep(words, amax, weights, divisors, across, codes)
    codes += CODES[numeric.scale_dtype][0]
    return codes


def integer_scales(words: Array, numeric: Numeric, across: int, importance: Array | None) -> Array:
    """The scales (rows, blocks) that use all codes of an integer dtype; those of `EITHER` may be negative.

    importance: float32 (in,), the mean square of each input, which weighs errors; without it the largest value of a
    block becomes the code of the largest magnitude (ggml's Q4_0, AutoRound), or half a code more than the last one
    (`POSITIVE`, llm-compressor).  Other arguments: see `integer_amax`.
    """
    (low, high), positive = INTEGER_RANGE[numeric.dtype], numeric.search == POSITIVE
    full = (high - low) / 2 if positive else low
    scales = np.empty((len(words), -(-words.shape[1] // across)), np.float32)
    if importance is None:
        signed_scales(words, np.float32(full), int(positive), across, scales)
    else:
        tried = TRIED_OF_FEW if -low < 8 else TRIED
        levels = (full + STEP * -low * tried * np.sign(full)).astype(np.float32)
        weighted_sweep(words, importance, levels, int(positive), across, low, high, scales)
    return scales


def fp4_scales(words: Array, amax: Array, numeric: Numeric, across: int, whole: float) -> Array:
    """The e4m3 codes of the scales of blocks.  whole: the amax of the weight; other arguments: see `integer_amax`."""
    if numeric.search == MSE:
        scales = SCALES[numeric.scale_dtype] / E4M3_MAX * np.float32(whole) / np.float32(numeric.maxbound)
        return searched_codes(words, amax, numeric, across, None, np.maximum(scales, np.float32(2.0**-149)))
    assert numeric.search == FOUR_OVER_SIX
    return _four_over_six(words, amax, numeric, across, np.float32(whole))


def _four_over_six(words: Array, amax: Array, numeric: Numeric, across: int, whole: np.float32) -> Array:
    losses, tried = [], [amax * np.float32(multiplier) for multiplier in SIX_OR_FOUR]
    bound, most = np.float32(numeric.maxbound), np.float32(numeric.largest_scale)
    # `compute_fp4_scales` rounds the scales that it tries by another formula than the export those that it writes
    covered = whole * (E4M3_MAX / most) / bound
    factor = E4M3_MAX / (covered if covered > ZERO else np.float32(1))
    for one in tried:
        codes = fp8_codes(np.minimum(one / bound * factor, E4M3_MAX))
        loss = np.empty(amax.shape, np.float32)
        fp4_errors(words, values(codes, "float8_e4m3fn") * (np.float32(1) / factor), across, loss)
        losses.append(loss)
    scale = np.where(losses[1] < losses[0], tried[1], tried[0]) / bound
    scale[scale == 0] = 1
    return fp8_codes(np.clip(scale * most / (whole / bound), LEAST, E4M3_MAX))
