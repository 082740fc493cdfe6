"""Snapped weights: whoever divides them by their stored scale and rounds gets the codes that they were made of.

A runtime's arithmetic is not ours, so each claim is made for several: true division, multiplication with the
reciprocal, division in the model's own dtype. What they lose is counted, over all scales where a dtype has 16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.core.dtypes import DTYPES, to_float32
from bridge.core.errors import SourceError
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.arrays import Array, cast
from bridge.quant.codec.blocks import grid
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.codec.fake_quant import fake_quantized, runtime_codes
from bridge.quant.codec.scales import MIN_AMAX, SMALLEST, TINY, round_up_subnormals
from bridge.verification.weight_error import compare
from tests.oracles import codec_reference as reference

FP8 = "float8_e4m3fn"
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LARGEST = {"bfloat16": 2.0**120, "float16": 65504.0, "float32": 2.0**120}  # 448 of it still has a float32
FORMATS = {
    "int8": Numeric("int8", "channel"),
    "int8_tensor": Numeric("int8", "tensor"),
    "int4": Numeric("int4", "block", (128,)),
    "int4_out": Numeric("int4", "block", (128, 1)),
    "fp8": Numeric(FP8, "tensor"),
    "fp8_channel": Numeric(FP8, "channel"),
}
# The least scale from which a dtype holds every code. Integers have none, their products with a subnormal scale are
# exact; of e4m3 the least code is 2^-9, and float16 has no number below 2^-24, bfloat16 none of 8 bits below 2^-126.
COMPLETE = {("float16", FP8): 2.0**-15, ("bfloat16", FP8): 2.0**-117}


def all_codes(dtype: str) -> Array:
    """Every code of a dtype, one byte each, NaN left out."""
    if dtype == FP8:
        return np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    low, high = reference.INTEGER_RANGE[dtype]
    return np.arange(low, high + 1).astype(np.int8).view(np.uint8)


def all_scales(dtype: str) -> Array:
    """Every positive scale of a 16-bit dtype (bfloat16: whose reciprocal float32 has); a sample of float32's."""
    if dtype == "float32":
        return np.exp2(np.random.default_rng(0).uniform(-60, 60, 1 << 14)).astype(np.float32)
    bits = np.arange(1, 1 << 15, dtype=np.uint16)
    found = to_float32(bits if dtype == "bfloat16" else bits.view(np.float16), dtype)
    return found[(found >= (TINY if dtype == "bfloat16" else SMALLEST)[dtype]) & (found <= LARGEST[dtype])]


def meant(codes: Array, dtype: str) -> torch.Tensor:
    """What codes stand for, by torch."""
    found = torch.from_numpy(codes.copy())
    return found.view(torch.float8_e4m3fn).float() if dtype == FP8 else found.view(torch.int8).float()


def rounded(quotient: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values of the codes that a runtime makes of w / scale."""
    if dtype == FP8:
        return quotient.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return quotient.float().round().clamp(*reference.INTEGER_RANGE[dtype])


def division(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return w.float() / scale.float()


def reciprocal(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return w.float() * (1 / scale.float())


def division_in_its_dtype(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return w / scale


def within_a_rounding(half: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether float16 numbers are as near to others as float16 allows."""
    return bool(((half.double() - exact).abs() <= (exact.abs() * 2.0**-11).clamp(min=2.0**-25)).all())


def lost(dtype: str, codes: str, arithmetic: Any, least: float = 0.0) -> float:
    """The part of all (code, scale) pairs whose code is another one after it was stored as `dtype`."""
    scales, each = all_scales(dtype), all_codes(codes)
    scales = scales[scales >= least]
    stored = fake_quantized(
        np.broadcast_to(each, (len(scales), len(each))).copy(),
        Numeric(codes, "channel"),
        scales[:, None],
        1,
        256,
        dtype,
    )
    words = stored.view(np.int16) if dtype == "bfloat16" else stored
    w = torch.from_numpy(words).view(TORCH[dtype])
    found = rounded(arithmetic(w, torch.from_numpy(scales).to(TORCH[dtype])[:, None]), codes)
    kept = (found == meant(each, codes)) | ~torch.isfinite(w)  # what overflows is refused, see below
    return 1 - float(kept.float().mean(dtype=torch.float64))


@pytest.mark.parametrize("codes", ["int8", "int4", FP8])
@pytest.mark.parametrize("dtype", TORCH)
def test_division_and_reciprocal_in_float32_lose_no_code(dtype: str, codes: str) -> None:
    least = COMPLETE.get((dtype, codes), 0.0)
    assert lost(dtype, codes, division, least) == 0
    assert lost(dtype, codes, reciprocal, least) == 0


@pytest.mark.parametrize(
    ("dtype", "codes", "least", "most"),
    [
        ("float16", "int8", 0, 0),
        ("float16", "int4", 0, 0),
        ("float16", FP8, 0, 0),
        ("bfloat16", "int4", 0, 0),
        ("bfloat16", FP8, 0, 0),
        # a quotient near 127 has steps of a half in bfloat16, so that it may round to the next code: 3 % of all
        ("bfloat16", "int8", 0.02, 0.04),
    ],
)
def test_an_engine_that_divides_in_the_models_dtype_loses_codes_of_int8_in_bfloat16_only(
    dtype: str, codes: str, least: float, most: float
) -> None:
    assert least <= lost(dtype, codes, division_in_its_dtype, COMPLETE.get((dtype, codes), 0.0)) <= most


def test_float8_codes_that_float16_loses_are_a_rounding_away_at_most() -> None:
    scales, each = all_scales("float16"), all_codes(FP8)
    scales = scales[scales < COMPLETE["float16", FP8]]
    stored = fake_quantized(
        np.tile(each, (len(scales), 1)), Numeric(FP8, "channel"), scales[:, None], 1, 256, "float16"
    )
    assert within_a_rounding(torch.from_numpy(stored), meant(each, FP8).double() * torch.from_numpy(scales)[:, None])
    assert lost("float16", FP8, division) > 0.001


# Scales


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.floats(2.0**-149, 2.0**100, width=32), st.sampled_from(list(TORCH)))
def test_a_resolved_scale_is_never_zero_never_smaller_and_stays_what_it_is(scale: float, dtype: str) -> None:
    given_ = np.array([scale], np.float32)
    found = round_up_subnormals(given_, dtype)
    assert found.dtype == np.float32 and (found >= given_).all()
    assert found[0] <= SMALLEST[dtype] or float(found[0]) - float(given_[0]) < SMALLEST[dtype]
    np.testing.assert_array_equal(round_up_subnormals(found, dtype), found)
    if scale >= TINY[dtype]:
        np.testing.assert_array_equal(found, given_)
    elif dtype != "float32":  # where the dtype has few bits the codes are made with what it holds, exactly
        np.testing.assert_array_equal(to_float32(cast(found, "float32", dtype), dtype), found)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(2.0**-149, 1.0, width=32), min_size=2, max_size=20), st.sampled_from(list(TORCH)))
def test_resolved_scales_keep_their_order(scales: list[float], dtype: str) -> None:
    found = round_up_subnormals(np.sort(np.array(scales, np.float32)), dtype)
    assert (np.diff(found) >= 0).all()


# Whole weights


def weight(source: str, magnitude: float, shape: tuple[int, int] = (256, 384)) -> tuple[Array, torch.Tensor]:
    """Normal weights of that size, rows spread over eight binades; a zero row and a row with one number."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal(shape) * magnitude * np.exp2(rng.integers(-4, 5, (shape[0], 1)))
    values[3], values[7] = 0, 0
    values[7, 11] = magnitude
    bits = cast(values.astype(np.float32), "float32", source)
    return bits, torch.from_numpy(to_float32(bits, source).copy())


def recoded(made: dict[str, Array], format_: Numeric, shape: tuple[int, int], dtype: str) -> Array:
    """The codes that a runtime makes of `encode`'s arrays."""
    cells = grid(format_, shape, "out_in")
    scale = to_float32(made["scale"], dtype).reshape(cells.shape)
    return runtime_codes(made["codes"], dtype, format_, scale, cells.down, cells.across)


def by_torch(w: torch.Tensor, format_: Numeric, dtype: str, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and stored scales by the formulas of the reference, in torch alone."""
    cells = grid(format_, tuple(w.shape), "out_in")
    amax = reference.block_amax(w, cells.down, cells.across)
    exact = torch.where(amax == 0, torch.tensor(1.0), amax.clamp(min=MIN_AMAX) / torch.tensor(format_.maxbound))
    scale = torch.from_numpy(round_up_subnormals(exact.numpy(), dtype))
    stored, bound = scale.to(TORCH[dtype]), torch.tensor(format_.maxbound)
    cover = (*w.shape, cells.down, cells.across)
    # ModelOpt's fake quantizer multiplies with bound / amax; a scale that was raised covers another amax
    largest = torch.where((scale == exact) & (amax > MIN_AMAX), amax, scale * bound)
    if format_.dtype == FP8:  # of a number and a tensor, which torch rounds twice
        quotient = w * reference.expand(448.0 / largest, *cover)
        return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), stored
    codes = (w * reference.expand(bound / largest, *cover)).round().clamp(*reference.INTEGER_RANGE[format_.dtype])
    return codes.to(torch.int8).view(torch.uint8), stored


@pytest.mark.parametrize("magnitude", [0.02, 3.0, 3e-3, 1e-5])  # the last two: subnormal scales in float16
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("source", TORCH)
def test_a_written_weight_has_the_codes_of_the_source(source: str, dtype: str, name: str, magnitude: float) -> None:
    format_, (bits, w) = FORMATS[name], weight(source, magnitude)
    made = encode(bits, source, (format_,), coding=Encoding(values=dtype))
    codes, scale = by_torch(w, format_, dtype, source)
    stored = to_float32(made["scale"], dtype)
    np.testing.assert_array_equal(stored.reshape(-1), scale.float().numpy().reshape(-1))
    assert (stored > 0).all() and np.isfinite(stored).all()
    found = recoded(made, format_, (256, 384), dtype)
    if dtype == "float16" and format_.dtype == FP8 and stored.min() < COMPLETE["float16", FP8]:
        factor = reference.expand(scale.double().reshape(-1, 1), 256, 384, 256 // scale.numel(), 384)
        assert within_a_rounding(torch.from_numpy(made["codes"]), meant(codes.numpy(), FP8) * factor)
        return
    negative_zero = np.uint8(0x80) if format_.dtype == FP8 else np.uint8(0)  # e4m3 keeps the sign, as torch does
    np.testing.assert_array_equal(
        np.where(found == negative_zero, 0, found), np.where(codes == negative_zero, 0, codes)
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_the_least_weights_become_numbers(source: str, name: str) -> None:
    """127 / amax has no float32 where amax is below 2^-121: infinity times a zero would be NaN."""
    format_, (bits, w) = FORMATS[name], weight(source, 2.0**-126)
    for dtype in ("float32", "bfloat16"):
        made = encode(bits, source, (format_,), coding=Encoding(values=dtype))
        found, scale = torch.from_numpy(to_float32(made["codes"], dtype)), to_float32(made["scale"], dtype)
        assert torch.isfinite(found).all() and (scale > 0).all() and not found[w == 0].any()
        half = 17 if format_.dtype == FP8 else 1  # of the largest step, and what the few bits of such a scale lose
        assert ((found - w).abs() <= half * float(scale[scale < 1].max())).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_conv1d_gives_the_values_of_its_linear_in_either_layout(name: str, turned: bool) -> None:
    format_, (bits, _) = FORMATS[name], weight("bfloat16", 0.02)
    coding = Encoding(values="float16")
    linear = encode(bits, "bfloat16", (format_,), coding=coding)
    across = np.ascontiguousarray(bits.T)
    conv1d = encode(across, "bfloat16", (format_,), layout="in_out", transpose=turned, coding=coding)
    np.testing.assert_array_equal(conv1d["codes"] if turned else conv1d["codes"].T, linear["codes"])
    scale = conv1d["scale"] if turned or conv1d["scale"].ndim < 2 else conv1d["scale"].T
    np.testing.assert_array_equal(scale, linear["scale"])


@pytest.mark.parametrize("name", FORMATS)
def test_parity_and_values_of_what_is_written_are_those_of_the_codes(name: str) -> None:
    format_, (bits, _) = FORMATS[name], weight("float32", 0.02)
    for dtype in TORCH:
        coding, shape = Encoding(values=dtype), (256, 384)
        made = encode(bits, "float32", (format_,), coding=coding)
        np.testing.assert_array_equal(
            decode(made, (format_,), shape, coding=coding), to_float32(made["codes"], dtype).reshape(shape)
        )
        plain = encode(bits, "float32", (format_,), coding=Encoding(scale_dtype="float32"))
        ours = compare(bits, "float32", made, (format_,), coding=coding)
        theirs = compare(bits, "float32", plain, (format_,))
        assert ours.not_nearest == 0
        # scales differ by the rounding to the model's dtype, and by nothing in float32
        assert ours.cosine == pytest.approx(theirs.cosine, abs=1e-4 if dtype == "bfloat16" else 1e-6)
        assert ours.norm_ratio == pytest.approx(theirs.norm_ratio, rel=2.0**-8 if dtype == "bfloat16" else 2.0**-11)
        if dtype == "float32":  # but for codes at ties
            assert ours.error == pytest.approx(theirs.error, rel=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_one_changed_code_is_seen(name: str) -> None:
    format_, (bits, _) = FORMATS[name], weight("float32", 0.02)
    coding = Encoding(values="float16")
    made = encode(bits, "float32", (format_,), coding=coding)
    cells = grid(format_, bits.shape, "out_in")
    scale = to_float32(made["scale"], "float16").reshape(cells.shape)[9 // cells.down, 5 // cells.across]
    made["codes"][9, 5] = np.float16(
        to_float32(made["codes"][9, 5:6], "float16")[0] + (64 if format_.dtype == FP8 else 1) * scale
    )
    assert compare(bits, "float32", made, (format_,), coding=coding).not_nearest == 1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("magnitude", [1e6, 1e30])  # in the second the scale overflows, too
def test_a_weight_that_the_dtype_does_not_hold_is_refused(name: str, magnitude: float) -> None:
    format_, (bits, _) = FORMATS[name], weight("bfloat16", magnitude)
    with pytest.raises(SourceError, match=r"^h\.w: does not fit float16; choose another dtype \(--dtype\)$"):
        encode(bits, "bfloat16", (format_,), coding=Encoding(values="float16"), name="h.w")
    found = encode(bits, "bfloat16", (format_,), coding=Encoding(values="bfloat16"), name="h.w")
    assert np.isfinite(to_float32(found["codes"], "bfloat16")).all()


def test_the_largest_number_of_a_dtype_may_round_up_to_infinity_with_its_scale() -> None:
    """65504 / 127 is stored as 516: 127 times that has no float16. It is refused, not clamped in silence."""
    bits = np.full((4, 6), 65504, np.float32)
    with pytest.raises(SourceError, match="does not fit float16"):
        encode(bits, "float32", (FORMATS["int8"],), coding=Encoding(values="float16"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_bad_number_is_snapped(bad: float) -> None:
    bits, _ = weight("float32", 0.02)
    bits[9, 9] = bad
    with pytest.raises(SourceError, match="such weights are refused, quantized or not: repair the checkpoint"):
        encode(bits, "float32", (FORMATS["int8"],), coding=Encoding(values="float16"))


def test_storage_is_that_of_the_dtype() -> None:
    for dtype in TORCH:
        made = encode(weight("float32", 1.0)[0], "float32", (FORMATS["int4"],), coding=Encoding(values=dtype))
        assert {array.dtype for array in made.values()} == {np.dtype(DTYPES[dtype].storage)}
