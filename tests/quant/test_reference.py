"""The plain formulas agree with code that other people wrote: ml_dtypes, torch, ModelOpt."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bridge.core.values import Encoding, Numeric
from tests.oracles import codec_oracle
from tests.oracles import codec_reference as reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EVERY_BF16 = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
FP8 = (Numeric("float8_e4m3fn", "tensor"),)
INT4 = (Numeric("int4", "block", (128,)),)
NVFP4 = (Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn"),)
MXFP8 = (Numeric("float8_e4m3fn", "block", (32,), "float8_e8m0fnu"),)
MXFP4 = (Numeric("float4_e2m1fn", "block", (32,), "float8_e8m0fnu"),)


def weight(dtype: torch.dtype, rows: int = 24, cols: int = 256, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, cols, generator=generator)
    w *= torch.exp2(torch.randint(-6, 4, (rows, 1), generator=generator))  # rows of different size
    w[3] = 0
    w[5, 32:64] = 0
    w[7, :16] *= 2.0**-14
    return w.to(dtype)


def test_fp8_codes_are_those_of_ml_dtypes_for_every_bfloat16() -> None:
    finite = EVERY_BF16[EVERY_BF16.isfinite()].float()
    for scale in (1.0, 0.37, 448 / 3):
        quotient = (finite / torch.tensor(scale)).clamp(-448, 448).numpy()
        expected = quotient.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(reference.fp8(finite, torch.tensor(scale)).numpy(), expected)


def test_fp4_codes_are_those_of_ml_dtypes_for_every_bfloat16() -> None:
    finite = EVERY_BF16[EVERY_BF16.isfinite()].float()
    expected = finite.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    ours = reference.fp4(finite, torch.tensor(1.0)).numpy()
    negative_zero = (finite == 0).numpy() & np.signbit(finite.numpy())
    np.testing.assert_array_equal(ours[~negative_zero], expected[~negative_zero])
    assert ours[negative_zero].tolist() == [0]


def test_decoded_tables_are_those_of_ml_dtypes() -> None:
    for name, size in (("float8_e4m3fn", 256), ("float8_e8m0fnu", 255), ("float4_e2m1fn", 16), ("int4", 16)):
        codes = np.arange(size, dtype=np.uint8)
        expected = codes.view(getattr(ml_dtypes, name)) if name != "int4" else codes.astype(ml_dtypes.int4)
        np.testing.assert_array_equal(
            reference.values(torch.from_numpy(codes), name).numpy(), expected.astype(np.float32)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_is_modelopts_tensor(dtype: torch.dtype) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    w = weight(dtype)
    ours = codec_oracle.encode(w, NVFP4)
    theirs, block, whole = NVFP4QTensor.quantize(w.clone(), 16)
    assert torch.equal(ours["codes"], theirs._quantized_data)
    assert torch.equal(ours["scale"], block.view(torch.uint8))
    assert torch.equal(ours["scale_2"], whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp8_is_modelopts_tensor(dtype: torch.dtype) -> None:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    w = weight(dtype)
    ours = codec_oracle.encode(w, MXFP8)
    theirs, scale = MXFP8QTensor.quantize(w.clone())
    assert torch.equal(ours["codes"], theirs._quantized_data.view(torch.uint8))
    assert torch.equal(ours["scale"], scale)


def test_e8m0_exponents_are_modelopts_for_every_16_bit_amax() -> None:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    for dtype in (torch.bfloat16, torch.float16):
        amax = torch.arange(32768).to(torch.int16).view(dtype).float()
        amax = amax[amax.isfinite()]
        expected = MXFP8QTensor._compute_e8m0_exponent(amax) + 127
        assert torch.equal(reference.e8m0(amax, 448.0), expected.to(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_modelopts_tensor_except_at_ties_and_zero(dtype: torch.dtype) -> None:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    w = weight(dtype)
    ours = codec_oracle.encode(w, MXFP4)
    theirs, scale = MXFP4QTensor.quantize(w.clone(), 32)
    used = (
        w.float().unflatten(1, (-1, 32)).abs().amax(-1) > 0
    )  # ModelOpt's zero block has log2(0): any exponent will do
    assert torch.equal(ours["scale"][used], scale.reshape(used.shape)[used])
    quotient = w.float() / reference.expand(reference.values(ours["scale"], "float8_e8m0fnu"), *w.shape, 1, 32)
    tie = torch.isin(quotient.abs(), torch.tensor(reference.E2M1_BOUNDS)) | (quotient == 0)
    ours_codes, their_codes = reference.unpack(ours["codes"]), reference.unpack(theirs._quantized_data)
    assert torch.equal(ours_codes[~tie], their_codes[~tie])
    assert (ours_codes != their_codes)[tie].any(), "the exception is real: drop it when ModelOpt rounds to even"


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_codes_are_modelopts_export(dtype: torch.dtype) -> None:
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8

    w = weight(dtype)
    ours = codec_oracle.encode(w, INT4, coding=Encoding(packed="out"))  # rows 2r and 2r + 1 share a byte there
    assert torch.equal(ours["codes"], pack_int4_in_uint8(w, ours["scale"], 128))


@pytest.mark.parametrize("dtype", DTYPES)
def test_per_tensor_fp8_is_rounded_twice_as_in_modelopts_unified_export(dtype: torch.dtype) -> None:
    from modelopt.torch.export.quant_utils import QUANTIZATION_FP8, to_quantized_weight

    w = weight(dtype, rows=200)
    once, twice = (codec_oracle.encode(w, FP8, coding=Encoding(quotient=q)) for q in ("float32", "weight"))
    assert twice["scale"] == w.abs().amax().float() / 448
    assert torch.equal(twice["codes"], to_quantized_weight(w, twice["scale"], QUANTIZATION_FP8).view(torch.uint8))
    if dtype == torch.bfloat16:
        assert (once["codes"] != twice["codes"]).any()


def test_a_cast_weight_keeps_the_scale_of_what_it_was() -> None:
    from modelopt.torch.export.quant_utils import QUANTIZATION_FP8_PC_PT, to_quantized_weight

    w = weight(torch.float32)
    ours = codec_oracle.encode(w, (Numeric("float8_e4m3fn", "channel"),), coding=Encoding(cast="bfloat16"))
    amax = w.abs().amax(1)
    assert torch.equal(ours["scale"], torch.where(amax == 0, 448, amax) / 448)
    theirs = to_quantized_weight(w.bfloat16(), ours["scale"], QUANTIZATION_FP8_PC_PT)
    assert torch.equal(ours["codes"], theirs.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "bits"), [("int4", 4), ("int8", 8)])
def test_int32_holds_codes_plus_half_of_their_range(dtype: str, bits: int) -> None:
    """The layout that compressed-tensors documents: first code in the lowest bits, what is missing is zero bits."""
    codes = torch.tensor([[-(1 << bits - 1), 0, (1 << bits - 1) - 1]], dtype=torch.int8)
    packed = codec_oracle.pack_int32(codes, bits)
    assert packed.tolist() == [[0 | (1 << bits - 1) << bits | ((1 << bits) - 1) << 2 * bits]]
    mask = (1 << bits) - 1
    assert torch.equal(codec_oracle.unpack_int32(packed, bits, 3), (codes.long() & mask).to(torch.uint8))


def test_int4_codes_differ_from_modelopts_reciprocal_only_at_ties() -> None:
    from modelopt.torch.quantization.qtensor import INT4QTensor

    w = weight(torch.float32)
    w[3] = 1
    ours = codec_oracle.encode(w, INT4)
    theirs, inverse = INT4QTensor.quantize(w, 128)
    torch.testing.assert_close(ours["scale"].flatten(), 1 / inverse.flatten(), rtol=2e-7, atol=0)
    packed = theirs._quantized_data  # the even code in the high nibble there, offset by 8
    their_codes = torch.stack((packed >> 4, packed & 15), -1).flatten(-2).float() - 8
    our_codes = reference.values(reference.unpack(ours["codes"]), "int4")
    tie = ((w / reference.expand(ours["scale"], *w.shape, 1, 128)).abs() % 1 - 0.5).abs() < 1e-5
    assert torch.equal(our_codes[~tie], their_codes[~tie])


@pytest.mark.parametrize(
    ("numeric", "axis", "bits"),
    [
        (Numeric("float8_e4m3fn", "tensor"), None, (4, 3)),
        (Numeric("float8_e4m3fn", "channel"), 0, (4, 3)),
        (Numeric("int8", "tensor"), None, 8),
        (Numeric("int8", "channel"), 0, 8),
    ],
)
def test_decoded_weights_are_modelopts_fake_quantized_ones(
    numeric: Numeric, axis: int | None, bits: int | tuple[int, int]
) -> None:
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    w = weight(torch.float32)
    w[3] = 1
    quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=bits, axis=axis))
    quantizer.amax = w.abs().amax(dim=None if axis is None else 1, keepdim=axis is not None)
    ours = codec_oracle.decode(codec_oracle.encode(w, (numeric,)), (numeric,), tuple(w.shape))
    torch.testing.assert_close(ours, quantizer(w), rtol=3e-7, atol=0)  # theirs divides by maxbound / amax


def test_zero_amax_gives_scale_one_and_subnormal_amax_a_positive_scale() -> None:
    for dtype in DTYPES:
        tiny = torch.finfo(dtype).tiny
        found = reference.scale(torch.tensor([0.0, tiny / 4, 448.0]), 448.0, dtype)
        assert found.tolist() == [1.0, (torch.tensor(tiny) / 448).item(), 1.0]
        assert (found > 0).all()
