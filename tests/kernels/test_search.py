"""Searched scales are those of ModelOpt's calibrators, and no scale of a block has a smaller error."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from bridge.core.values import Numeric
from bridge.quant.codec.arrays import readable
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.codec.search import fp4_scales, integer_amax, multipliers
from tests.oracles import codec_reference as reference
from tests.oracles import plain_fp4

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INT4 = Numeric("int4", "block", (128,), search="mse")
FP4 = {
    search: Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn", search=search)
    for search in ("mse", "four_over_six")
}


def weight(dtype: str, rows: int = 48, cols: int = 512) -> torch.Tensor:
    """Student t (3) rows of different size, with zeros, a block with one value, and one of very small ones."""
    rng = np.random.default_rng(0)
    w = torch.from_numpy(rng.standard_t(3, (rows, cols)) * np.exp2(rng.integers(-6, 4, (rows, 1)))).float() * 0.02
    w[3] = 0
    w[5, 32:160] = 0
    w[5, 33] = 0.25
    w[7, :128] *= 2.0**-20
    w[9, :256] = torch.tensor([0.5, -1.0, 2.0, 0.25] * 64)
    return w.to(DTYPES[dtype])


def stored(w: torch.Tensor) -> np.ndarray:
    return (w.view(torch.uint16) if w.dtype == torch.bfloat16 else w).numpy()


def words(w: torch.Tensor, dtype: str) -> np.ndarray:
    return readable(stored(w), dtype, np.empty(w.numel(), np.uint32))


def test_multipliers_are_those_of_torch() -> None:
    np.testing.assert_array_equal(multipliers(), torch.linspace(0.25, 4.0, 39).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_amax_is_that_of_the_plain_search(dtype: str) -> None:
    w = weight(dtype)
    amax = reference.block_amax(w, 1, 128)
    theirs = reference.integer_search(w, amax, 7.0, -8, 7)
    ours = integer_amax(words(w, dtype), amax.numpy(), INT4, 128, 7.0)
    np.testing.assert_array_equal(ours, theirs.numpy())


def every_error(w: np.ndarray, amax: np.ndarray, bound: float) -> np.ndarray:
    """The error of each block (rows, blocks, values) under each multiplier, every operation rounded to float32."""
    found = []
    for multiplier in multipliers():
        with np.errstate(over="ignore"):
            tried = amax * multiplier
        scale = np.divide(np.float32(bound), tried, out=np.zeros_like(tried), where=tried > 2.0**-24)[..., None]
        codes = np.clip(np.rint(w * scale), -8, 7).astype(np.float32)
        with np.errstate(over="ignore"):
            errors = np.square(w - codes / np.where(scale > 0, scale, np.float32(1)))
        while (n := errors.shape[-1]) > 1:  # the second half is added to the first
            half = n // 2
            with np.errstate(over="ignore"):
                low = errors[..., :half] + errors[..., n - half :]
            errors = np.concatenate([low, errors[..., half : n - half]], axis=-1)
        found.append(errors[..., 0])
    return np.stack(found)


def sized(values: np.ndarray, low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    """Rows times a power of two between 2^low and 2^high."""
    return values * np.exp2(rng.integers(low, high, (len(values), 1)))


KINDS = {
    "normal": lambda rng, shape: rng.normal(size=shape) * 0.02,
    "heavy tails": lambda rng, shape: sized(rng.standard_t(3, shape), -30, 20, rng),
    "squares that underflow": lambda rng, shape: sized(rng.normal(size=shape), -140, -18, rng),
    "squares that overflow": lambda rng, shape: sized(rng.normal(size=shape), 50, 125, rng),
    "codes, which several scales hold": lambda rng, shape: sized(rng.integers(-8, 8, shape), -9, 9, rng),
    "few different values": lambda rng, shape: rng.integers(-3, 4, shape) * 0.1,
    "mostly zeros": lambda rng, shape: rng.normal(size=shape) * (rng.random(shape) < 0.02),
}


@pytest.mark.parametrize("bound", [7.0, 8.0])
@pytest.mark.parametrize("block", [128, 100, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_estimates_choose_what_exact_errors_choose(kind: str, block: int, bound: float) -> None:
    w = KINDS[kind](np.random.default_rng(block), (64, 8 * block)).astype(np.float32)
    blocks = w.reshape(64, 8, block)
    amax = np.abs(blocks).max(axis=-1)
    losses = every_error(blocks, amax, bound)
    best = np.take_along_axis(amax * multipliers()[:, None, None], losses.argmin(axis=0)[None], axis=0)[0]
    theirs = np.where(np.isfinite(losses.min(axis=0)), best, amax)
    numeric = Numeric("int4", "block", (block,), search="mse")
    ours = integer_amax(readable(w, "float32", np.empty(w.size, np.uint32)), amax, numeric, block, bound)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole", [1.0, 8.0], ids=["own amax", "a larger amax"])
def test_the_sweep_finds_what_modelopts_finds(dtype: str, whole: float) -> None:
    w = weight(dtype)
    amax = reference.block_amax(w, 1, 16)
    top = amax.max() * whole
    codes = fp4_scales(words(w, dtype), amax.numpy(), FP4["mse"], 16, float(top))
    theirs = plain_fp4.sweep(w, top)
    index = (reference.values(torch.from_numpy(codes), "float8_e4m3fn") / 448.0 * top).reshape(-1)
    np.testing.assert_array_equal(index.numpy(), theirs.numpy())


@pytest.mark.parametrize("search", FP4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_searched_nvfp4_is_never_worse_than_amax(search: str, dtype: str) -> None:
    w = weight(dtype)
    plain = Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn")

    def errors(numeric: Numeric) -> np.ndarray:
        arrays = encode(stored(w), dtype, (numeric,))
        off = decode(arrays, (numeric,), tuple(w.shape)) - w.float().numpy()
        return np.square(off.astype(np.float64)).sum()

    assert errors(FP4[search]) < 0.95 * errors(plain)


def test_a_weight_of_zeros_is_written_as_zeros() -> None:
    for numeric in (INT4, *FP4.values()):
        arrays = encode(np.zeros((4, 256), np.float32), "float32", (numeric,))
        assert not arrays["codes"].any() and (np.asarray(arrays["scale"]) != 0).all()


@pytest.mark.parametrize("numeric", [INT4, *FP4.values()], ids=["int4", *FP4])
def test_pieces_of_rows_and_the_transpose_get_the_same_scales(numeric: Numeric) -> None:
    bits = stored(weight("bfloat16"))
    whole = encode(bits, "bfloat16", (numeric,))
    turned = encode(bits, "bfloat16", (numeric,), transpose=True)
    np.testing.assert_array_equal(turned["scale"], whole["scale"].T)
    amax = float(reference.block_amax(weight("bfloat16"), 1, 512).max())
    half = encode(bits[24:], "bfloat16", (numeric,), amax=amax)
    np.testing.assert_array_equal(half["scale"], whole["scale"][24:])


@pytest.mark.parametrize("scale_dtype", ["float8_e4m3fn", "float8_e8m0fnu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_no_scale_has_a_smaller_weighted_error(dtype: str, scale_dtype: str, sigma: float) -> None:
    """All scales that a block may have, in float64, with codes from a table of FP4's magnitudes."""
    block = 16 if scale_dtype == "float8_e4m3fn" else 32
    numeric = Numeric("float4_e2m1fn", "block", (block,), scale_dtype, search="weighted")
    w, importance = weight(dtype, 16, 256), np.random.default_rng(1).lognormal(0, sigma, 256).astype(np.float32)
    importance[:block] = 0  # inputs that say nothing of their block: as if alike
    made = encode(stored(w), dtype, (numeric,), importance=importance)
    blocks = w.double().numpy().reshape(16, -1, 1, block)
    weights = np.where(importance.any() & (np.arange(256) < block), 1.0, importance.astype(np.float64))
    weights = weights.reshape(1, -1, 1, block)
    if scale_dtype == "float8_e4m3fn":
        scales = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scales = scales * float(np.abs(blocks).max()) / (6 * 448)
        decoded = made["scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * float(made["scale_2"])
    else:
        scales = np.exp2(np.arange(-60.0, 20.0))
        decoded = np.exp2(made["scale"].astype(np.float64) - 127)

    def error(scale: np.ndarray) -> np.ndarray:
        quotient, magnitudes = np.abs(blocks) / scale[..., None], np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        nearest = magnitudes[np.abs(quotient[..., None] - magnitudes).argmin(-1)]
        return (weights * (np.abs(blocks) - nearest * scale[..., None]) ** 2).sum(-1)

    least, own = error(scales).min(-1), error(decoded[..., None])[..., 0]
    rounded = 1e-12 * (weights * blocks**2).sum((-1, -2))  # of a block that has no error but that of float32
    assert (own <= least * (1 + 1e-4) + rounded).all()


def test_scales_weighted_alike_are_those_of_the_least_error() -> None:
    w = weight("float32")
    mse, ours = FP4["mse"], replace(FP4["mse"], search="weighted")
    for name, array in encode(stored(w), "float32", (mse,)).items():
        np.testing.assert_array_equal(encode(stored(w), "float32", (ours,))[name], array)
