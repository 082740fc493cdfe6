"""Weights, formats and codings on which kernels of a device are compared with those of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bridge.compat import fp8_casts
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.encode import encode as encode_on_host
from tests.quant.test_encode import SCHEMES as PLAIN_SCHEMES

FP8, FP4, MX = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu"
DTYPES = ("bfloat16", "float16", "float32")
SCHEMES = PLAIN_SCHEMES | {
    "int4_64": (Numeric("int4", "block", (64,)),),
    "int8_blocks": (Numeric("int8", "block", (32,)),),
    "fp8_groups": (Numeric(FP8, "block", (128,)),),
    "w4a8_nvfp4": (Numeric(FP4, "block", (32,), FP8),),
}


def _codings(first: Numeric) -> list[Encoding]:
    """As targets spell formats: ModelOpt's, compressed-tensors' with ModelOpt's and llm-compressor's numbers, GPTQ's,
    ONNX's in half floats, llama.cpp's."""
    found = [Encoding(), Encoding(cast="float16"), Encoding(cast="bfloat16", quotient="weight", scale_dtype="bfloat16")]
    if first.scale_dtype == "float32":
        found += [Encoding(quotient="weight"), Encoding(quotient="weight", scale_dtype="float16")]
        found += [Encoding(scale_dtype=dtype, round_up=True) for dtype in ("float16", "bfloat16")]
    if first.dtype in ("int4", "int8"):
        bound = 7.5 if first.dtype == "int4" else 127.5
        found += [
            Encoding(packed="int32"),
            Encoding(packed="int32", quotient="weight", scale_dtype="bfloat16", bound=bound),
        ]
    if first.dtype in ("int4", FP4):
        found += [Encoding(packed="out")]
    if first.two_level:
        found += [Encoding(reciprocal=True, exact=True), Encoding(reciprocal=True, scale_dtype="bfloat16")]
        found += [Encoding(reciprocal=True, scale_dtype="float16")]
    if first.scale_dtype == MX:
        found += [Encoding(bound=256.0 if first.dtype == FP8 else 4.0)]
    return found


CODINGS = {scheme: _codings(numeric[0]) for scheme, numeric in SCHEMES.items()}


def weight(shape: tuple[int, int], dtype: str, seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes, subnormal ones too, with rows and blocks of zeros, zeros of both signs, and ties."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=draw) * torch.exp2(torch.randint(-12, 4, (shape[0], 1), generator=draw))
    w[1], w[2, : min(130, shape[1])] = 0, -0.0
    w[3] *= 2.0**-126 if dtype != "float16" else 2.0**-14
    w[4] = torch.arange(shape[1]) % 17 - 8.5
    return w.to(getattr(torch, dtype))


def as_bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(getattr(torch, {1: "uint8", 2: "uint16", 4: "int32"}[tensor.itemsize])).numpy()


def same_bytes(found: dict[str, torch.Tensor], w: torch.Tensor, numeric: tuple[Numeric, ...], **spelt: Any) -> None:
    """Assert that `found` is what the CPU's kernels make of a weight."""
    dtype = str(w.dtype).removeprefix("torch.")
    bits = w.numpy() if dtype != "bfloat16" else w.view(torch.uint16).numpy()
    wanted = encode_on_host(bits, dtype, numeric, **spelt)
    assert found.keys() == wanted.keys()
    for part, array in wanted.items():
        ours, what = as_bits(found[part]), f"{part} {numeric} {spelt} {dtype} {tuple(w.shape)}"
        theirs = array.reshape(found[part].shape) if array.ndim == 0 else array
        assert found[part].is_contiguous() and ours.shape == theirs.shape, what
        np.testing.assert_array_equal(ours, theirs.view(ours.dtype), err_msg=what)


CASTS: dict[str, dict[str, Any]] = {
    "groupwise_activation_quant": {"block_size": 64},
    "per_token_cast_to_fp8": {"use_ue8m0": False},
    "per_token_cast_to_fp8 power": {"use_ue8m0": True},
    "per_block_cast_to_fp8": {"use_ue8m0": False},
    "per_block_cast_to_fp8 power": {"use_ue8m0": True},
}


def casts(w: torch.Tensor) -> list[torch.Tensor]:
    """Codes and scales of the casts of DeepSeek's and torchtitan's kernels."""
    made = [getattr(fp8_casts, name.split()[0])(w, **spelt) for name, spelt in CASTS.items()]
    return [tensor for pair in made for tensor in pair]
