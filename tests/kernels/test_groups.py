"""Casts by groups give the bits of the plain torch formulas, and of code that other people wrote."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from bridge.compat.fp8_casts import (
    calculate_scale_shape,
    dequantize_from_fp8,
    groupwise_activation_quant,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
)
from bridge.core.errors import SourceError, UsageError
from tests.oracles import codec_reference as reference

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHAPES = [(1, 1), (3, 128), (130, 129), (7, 300), (256, 384), (5, 127)]


def storage(w: torch.Tensor) -> np.ndarray:
    return w.view(torch.int16).numpy().view(np.uint16) if w.dtype == torch.bfloat16 else w.numpy()


def tensor(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(bits)


def weight(shape: tuple[int, int], dtype: str, seed: int = 0) -> torch.Tensor:
    """Random values of every magnitude that the dtype has, with a zero row and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator)
    w *= torch.exp2(torch.randint(-20, 12, (shape[0], 1), generator=generator))
    w[shape[0] // 2] = 0
    w[0, :2] = -0.0
    return w.to(TORCH[dtype])


def every_finite(dtype: str) -> torch.Tensor:
    """All finite patterns of 16 bits, neighbours in one group: maxima of every mantissa, subnormals, both zeros."""
    if dtype == "float32":
        w = (torch.arange(1 << 16) << 16 | torch.randint(0, 1 << 16, (1 << 16,))).to(torch.int32).view(torch.float32)
    else:
        w = torch.arange(1 << 16).to(torch.int16).view(TORCH[dtype])
    w = w[w.isfinite()]
    return w[: len(w) // 640 * 640].reshape(-1, 640)


def same(ours: tuple[np.ndarray, np.ndarray], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    np.testing.assert_array_equal(ours[1].view(np.uint32), expected[1].numpy().view(np.uint32))
    np.testing.assert_array_equal(ours[0], expected[0].numpy())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TORCH)
def test_casts_are_the_reference(dtype: str) -> None:
    for w in [*(weight(shape, dtype) for shape in SHAPES), every_finite(dtype)]:
        bits = storage(w)
        same(groupwise_activation_quant(bits, dtype), reference.by_quotient(w, 128, 1e-9))
        for power in (False, True):
            same(per_token_cast_to_fp8(bits, dtype, use_ue8m0=power), reference.by_product(w, 1, 128, 1e-4, power))
            same(per_block_cast_to_fp8(bits, dtype, use_ue8m0=power), reference.by_product(w, 128, 128, 1e-4, power))


@pytest.mark.slow
def test_the_product_is_the_tensor_expression_of_deepgemm() -> None:
    """`x * (448.0 / amax)` as torch evaluates it; a quotient by the scale has other codes."""
    w = torch.randn(600, 384, generator=torch.Generator().manual_seed(5)).bfloat16()
    groups = w.unflatten(1, (-1, 128))
    amax = groups.abs().float().amax(-1, keepdim=True).clamp(1e-4)
    codes = (groups * (448.0 / amax)).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    same(per_token_cast_to_fp8(storage(w)), (codes, (amax / 448.0).squeeze(-1)))
    assert 0 < (groupwise_activation_quant(storage(w))[0] != codes.numpy()).mean() < 1e-3


def test_quotients_are_rounded_as_ml_dtypes_rounds_them() -> None:
    w = every_finite("bfloat16")
    codes, scale = groupwise_activation_quant(storage(w))
    quotient = w.float().numpy() / scale.repeat(128, 1)
    np.testing.assert_array_equal(codes, quotient.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_blocks_with_powers_of_two_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="ue8m0")
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(3)).bfloat16()
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"w.weight": w})
    codes = theirs["w.weight"].view(torch.uint8)
    same(per_block_cast_to_fp8(storage(w), use_ue8m0=True), (codes, theirs["w.weight_scale_inv"].float()))


@pytest.mark.parametrize("shape", [(130, 129), (300, 72)])
@pytest.mark.parametrize("dtype", TORCH)
def test_ragged_blocks_dequantize_as_in_torchs_checkpoint_reader(shape: tuple[int, int], dtype: str) -> None:
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

    codes, scale = per_block_cast_to_fp8(storage(weight(shape, "bfloat16")))
    reader = QuantizedHuggingFaceStorageReader("unused", target_dtype=TORCH[dtype])
    rows, cols = shape
    mapping = (0, scale.shape[0]), (0, scale.shape[1]), slice(0, rows), slice(0, cols)
    fp8 = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    theirs = reader._dequantize_tensor(fp8, torch.from_numpy(scale), torch.Size(shape), mapping)
    ours = dequantize_from_fp8(codes, scale, dtype)
    assert torch.equal(tensor(ours, dtype), theirs)
    assert torch.equal(
        theirs, reference.dequantize(torch.from_numpy(codes), torch.from_numpy(scale), 128, TORCH[dtype])
    )


def test_a_group_of_zeros_has_zero_codes_and_a_positive_scale() -> None:
    zeros = np.zeros((4, 256), np.uint16)
    for cast, least in (
        (groupwise_activation_quant, np.float32(1e-9)),
        (per_token_cast_to_fp8, np.float32(1e-4) / np.float32(448)),
        (per_block_cast_to_fp8, np.float32(1e-4) / np.float32(448)),
    ):
        codes, scale = cast(zeros)
        assert not codes.any()
        assert (scale == least).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "found"),
    [("nan", "NaN in 1 block of {1}, {0} in all"), ("-inf", "x: infinity in 1 block of {1}, {0} in all")],
)
@pytest.mark.parametrize("power", [False, True])
def test_a_value_that_is_no_number_is_refused(bad: str, found: str, power: bool) -> None:
    w = np.ones((130, 256), np.float32)
    w[129, 200] = float(bad)
    with pytest.raises(SourceError, match=found.format(260, "1 x 128")):
        per_token_cast_to_fp8(w, "float32", use_ue8m0=power)
    with pytest.raises(SourceError, match=found.format(4, "128 x 128")):
        per_block_cast_to_fp8(w, "float32", use_ue8m0=power)
    with pytest.raises(SourceError, match=found.format(520, "1 x 64")):
        groupwise_activation_quant(w, "float32", block_size=64)


def test_groups_keep_the_leading_axes_and_any_length() -> None:
    w = weight((12, 70), "float32")
    codes, scale = groupwise_activation_quant(w.reshape(3, 4, 70).numpy(), "float32", block_size=32)
    assert (codes.shape, scale.shape) == ((3, 4, 70), (3, 4, 3))
    same((codes.reshape(12, 70), scale.reshape(12, 3)), reference.by_quotient(w, 32, 1e-9))


def test_chunks_do_not_show_in_the_result() -> None:
    w = weight((700, 1030), "float16")
    same(per_block_cast_to_fp8(storage(w), "float16"), reference.by_product(w, 128, 128, 1e-4, False))
    same(groupwise_activation_quant(storage(w), "float16"), reference.by_quotient(w, 128, 1e-9))


def test_wrong_shapes_are_named() -> None:
    codes = np.zeros((130, 129), np.uint8)
    assert calculate_scale_shape(codes) == (2, 2)
    assert calculate_scale_shape(codes, 100) == (2, 2)
    for scale in (np.ones((2, 1), np.float32), np.ones((2, 2), np.float64)):
        with pytest.raises(UsageError, match=r"scales of shape \(2, 2\), got float"):
            dequantize_from_fp8(codes, scale)
    with pytest.raises(UsageError, match=r"two axes, but the array has shape \(3, 4, 5\)"):
        per_block_cast_to_fp8(np.zeros((3, 4, 5), np.float32), "float32")
    with pytest.raises(UsageError, match="at least 1, not 0"):
        groupwise_activation_quant(np.zeros((3, 4), np.float32), "float32", block_size=0)
    with pytest.raises(UsageError, match=r"shape \(3, 0\) has no values there"):
        per_token_cast_to_fp8(np.zeros((3, 0), np.float32), "float32")


@pytest.mark.parametrize("dtype", TORCH)
def test_a_tensor_gives_tensors_with_the_values_of_the_torch_expression(dtype: str) -> None:
    w = torch.nn.Parameter(weight((130, 256), dtype))
    groups = w.detach().float().unflatten(1, (-1, 128))
    amax = groups.abs().amax(-1).clamp(1e-4)
    codes, scale = per_token_cast_to_fp8(w)
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(scale, amax / 448.0)
    assert torch.equal(codes.float(), (groups * (448.0 / amax[..., None])).to(codes.dtype).float().flatten(1))
    quotients, scales = groupwise_activation_quant(w.unflatten(0, (2, 65)))
    assert quotients.shape == (2, 65, 256) and scales.shape == (2, 65, 2)
    blocks, inverse = per_block_cast_to_fp8(w.t())
    same(
        (blocks.view(torch.uint8).numpy(), inverse.numpy()), reference.by_product(w.detach().t(), 128, 128, 1e-4, False)
    )
    values = dequantize_from_fp8(blocks, inverse, TORCH[dtype])
    assert torch.equal(values, reference.dequantize(blocks.view(torch.uint8), inverse, 128, TORCH[dtype]))


def test_an_array_says_its_own_dtype() -> None:
    """float16 was read as bfloat16; an array of ml_dtypes holds what a storage array holds."""
    w = np.random.default_rng(0).standard_normal((2, 128)).astype(np.float16)
    scale = per_token_cast_to_fp8(w)[1]
    np.testing.assert_allclose(scale[:, 0], np.abs(w.astype(np.float32)).max(1) / 448, rtol=1e-6)
    brain = w.astype(ml_dtypes.bfloat16)
    for ours, theirs in zip(per_token_cast_to_fp8(brain), per_token_cast_to_fp8(brain.view(np.uint16)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    codes, scales = per_block_cast_to_fp8(w)
    values = dequantize_from_fp8(codes.view(ml_dtypes.float8_e4m3fn), scales, "float32")
    np.testing.assert_array_equal(values, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales)


@pytest.mark.parametrize(
    ("x", "dtype", "said"),
    [
        (np.ones((2, 128), np.float16), "bfloat16", "is float16, not the given bfloat16"),
        (torch.ones(2, 128), torch.bfloat16, "is float32, not the given bfloat16"),
        (np.ones((2, 128)), None, "is float64; expected one of float32, float16, bfloat16"),
        (np.ones((2, 128), ">f4"), None, "is >f4; expected"),
        (torch.ones(2, 128, dtype=torch.int16), None, "is int16; expected"),
        (torch.ones(2, 128, dtype=torch.complex64), None, "is complex64; expected"),
        ([[1.0] * 128], None, "expected an array or a torch tensor, got list"),
    ],
)
def test_a_wrong_dtype_is_a_type_error(x: Any, dtype: Any, said: str) -> None:
    for cast in (groupwise_activation_quant, per_token_cast_to_fp8, per_block_cast_to_fp8):
        with pytest.raises(TypeError, match=said):
            cast(x, dtype)


@pytest.mark.slow
def test_casting_loads_no_framework() -> None:
    code = (
        "import sys, numpy as np, bridge.compat.fp8_casts as g; g.dequantize_from_fp8(*g.per_block_cast_to_fp8("
        "np.ones((3, 4), np.float32), 'float32')); assert not {'torch', 'triton', 'ml_dtypes'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
