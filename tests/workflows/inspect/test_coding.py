"""Fake quantization is `encode` and `decode`, bit for bit, and Transformer Engine's formulas where they differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge.core.dtypes import SEARCHED, from_float32, to_float32
from bridge.core.mappings import table_files
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.load import load_scheme
from bridge.workflows.inspect.statistics.coding import fake_quantized, multiplied
from bridge.workflows.inspect.statistics.quantization import (
    FORMATS,
    RECIPES,
    Quantization,
    of_format,
    of_recipe,
    of_scheme,
)

DTYPES = ["float32", "bfloat16", "float16"]
SCHEMES = sorted(path.stem for path in table_files("schemes") if path.stem != "kv")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def tensor(shape: tuple[int, ...], dtype: str, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 4, (*shape[:-1], 1)))
    x[..., ::7] = 0
    x[..., 1::31] *= -0.0
    return from_float32(x.astype(np.float32), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_encode_and_decode(name: str, dtype: str) -> None:
    scheme, bits = load_scheme(name), tensor((130, 256), dtype)
    for which in ("weight", "activation"):
        how = of_scheme(scheme, which)
        if how is None:
            assert which == "activation" and scheme.input is None
            continue
        first = how.numeric[0]
        coding = Encoding(packed=first.dtype) if first.dtype in SEARCHED else Encoding()
        amax = how.amax or None
        arrays = encode(bits, dtype, how.numeric, coding=coding, amax=amax)
        wanted = decode(arrays, how.numeric, bits.shape, coding=coding)
        np.testing.assert_array_equal(fake_quantized(bits, dtype, how).view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("numeric", [
    Numeric("int4", "block", (128,)), Numeric("float4_e2m1fn", "block", (16,), E4M3),
    Numeric("float4_e2m1fn", "block", (32,), "float8_e8m0fnu"), Numeric(E4M3, "block", (128, 128)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (2, 5, 131), (129, 257)])
def test_widths_that_no_block_divides(numeric: Numeric, shape: tuple[int, ...]) -> None:
    bits = tensor(shape, "bfloat16")
    flat = bits.reshape(-1, shape[-1])
    wide = np.pad(flat, [(0, 0), (0, flat.shape[1] % 2)])  # two codes of 4 bits are one byte
    arrays = encode(wide, "bfloat16", (numeric,))
    wanted = decode(arrays, (numeric,), wide.shape)[:, : flat.shape[1]].reshape(shape)
    np.testing.assert_array_equal(fake_quantized(bits, "bfloat16", Quantization((numeric,))), wanted)


@pytest.mark.parametrize("rows", [1, 127, 700])
def test_pieces_of_rows_do_not_show(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = tensor((rows, 96), "float16")
    hows = [of_scheme(load_scheme(name), "weight") for name in ("fp8", "fp8_block", "int8", "nvfp4", "mxfp8")]
    hows += [of_recipe("fp8_current_scaling", "gradient"), of_format("MXFP8E5M2")]
    whole = [fake_quantized(bits, "float16", how) for how in hows if how]
    monkeypatch.setattr("bridge.workflows.inspect.statistics.coding.PIECE", 1000)
    for how, wanted in zip(hows, whole, strict=True):
        assert how
        np.testing.assert_array_equal(fake_quantized(bits, "float16", how), wanted)


def torchs(x: np.ndarray, dtype: str) -> np.ndarray:
    bound = 448.0 if dtype == E4M3 else 57344.0
    clipped = torch.from_numpy(np.clip(x, -bound, bound))
    return clipped.to(getattr(torch, dtype)).float().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "code"), [("activation", E4M3), ("weight", E4M3), ("gradient", E5M2)])
def test_current_scaling_is_transformer_engines_formula(dtype: str, kind: str, code: str) -> None:
    """fp8_max / amax, cast, times the reciprocal. The kernels divide; FakeQuant's `_default_sf_compute` does in torch,
    where a number / a tensor is rounded twice: that is another factor for one amax in four.
    """
    bound, apart = 448.0 if code == E4M3 else 57344.0, 0
    for seed in range(12):
        bits = tensor((33, 70), dtype, seed)
        x = torch.from_numpy(to_float32(bits, dtype))
        once, twice = torch.tensor(bound) / x.abs().max(), bound / x.abs().max()
        apart += int(once != twice)
        for how, scale in (
            (of_recipe("fp8_current_scaling", kind), once),
            (of_format(f"FP8{code[7:11].upper()}"), twice),
        ):
            wanted = torchs((x * scale).numpy(), code) * (1 / scale).numpy()
            np.testing.assert_array_equal(fake_quantized(bits, dtype, how), wanted)
    assert apart


def test_delayed_scaling_takes_an_amax_and_saturates() -> None:
    how, x = of_recipe("fp8_delayed_scaling", "activation"), np.array([[0.5, -3, 100]], np.float32)
    assert how.static
    np.testing.assert_allclose(fake_quantized(x, "float32", how, amax=2.0), [[0.5, -2, 2]], rtol=1e-6)


@pytest.mark.parametrize(("kind", "block"), [("activation", (1, 128)), ("gradient", (1, 128)), ("weight", (128, 128))])
def test_block_scaling_is_transformer_engines_formula(kind: str, block: tuple[int, int]) -> None:
    """`Float8BlockScaling`: 448 / amax without its mantissa."""
    bits = tensor((256, 384), "float32")
    bits[:, :128] *= np.float32(2.0**-100)
    bits[0, 0] = np.float32(448 * 2.0**-70)  # an amax whose scale is a power of two already
    bits[128, 200] = np.float32(np.nextafter(np.float32(448 * 32), np.float32(np.inf)))
    tiles = np.abs(bits).reshape(256 // block[0], block[0], 3, 128).max(axis=(1, 3))
    scale = (np.float32(448) / tiles).view(np.uint32) & np.uint32(0xFF800000)
    wide = scale.view(np.float32).repeat(block[0], 0).repeat(128, 1)
    wanted = torchs(bits * wide, E4M3) / wide
    np.testing.assert_array_equal(fake_quantized(bits, "float32", of_recipe("fp8_block_scaling", kind)), wanted)


@pytest.mark.parametrize(("name", "code"), [("MXFP8E4M3", E4M3), ("MXFP8E5M2", E5M2)])
def test_mx_formats_are_powers_of_two_above(name: str, code: str) -> None:
    bits = tensor((40, 96), "bfloat16")
    x = to_float32(bits, "bfloat16")
    bound = 448.0 if code == E4M3 else 57344.0
    largest = np.abs(x).reshape(40, 3, 32).max(axis=2).astype(np.float64)
    wide = np.exp2(np.ceil(np.log2(np.where(largest, largest, bound) / bound))).astype(np.float32).repeat(32, 1)
    np.testing.assert_array_equal(fake_quantized(bits, "bfloat16", of_format(name)), torchs(x / wide, code) * wide)


def test_recipes_that_are_schemes_here() -> None:
    for recipe in ("mxfp8", "nvfp4"):
        for kind, same in (("weight", "weight"), ("activation", "activation"), ("gradient", "activation")):
            scheme = of_scheme(load_scheme(recipe), same)
            assert scheme and of_recipe(recipe, kind).numeric == scheme.numeric
        assert not of_recipe(recipe, "activation").static


def test_which_transposes_differ() -> None:
    assert not of_recipe("fp8_current_scaling", "weight").turns
    assert not of_recipe("fp8_block_scaling", "weight").turns
    assert of_recipe("fp8_block_scaling", "activation").turns
    assert all(of_recipe(recipe, "activation").turns for recipe in ("mxfp8", "nvfp4"))


def test_a_scheme_without_inputs_leaves_them_and_tokens_are_rows() -> None:
    assert of_scheme(load_scheme("int8_wo"), "gradient") is None
    weight, token = of_scheme(load_scheme("fp8_pc_pt"), "wgrad"), of_scheme(load_scheme("fp8_pc_pt"), "output")
    assert weight and token and token.numeric[0].per == weight.numeric[0].per == "channel" and not token.static
    fixed = of_scheme(load_scheme("nvfp4_input_scale1"), "activation")
    assert fixed and (fixed.amax, fixed.static) == (2688, True)


HOWS = [of_recipe(recipe, "gradient") for recipe in RECIPES] + [of_format(name) for name in FORMATS]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_zeros_stay_zeros(how: Quantization) -> None:
    x = np.array([[0.0, -0.0, 0.0]], np.float32)
    assert not fake_quantized(x, "float32", how).any()
    for shape in ((0, 4), (3, 0)):
        assert fake_quantized(np.zeros(shape, np.float32), "float32", how).shape == shape
    np.testing.assert_allclose(fake_quantized(np.array(3, np.float32), "float32", how), 3, rtol=1e-6)


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_and_does_not_reach_the_others(how: Quantization, dtype: str) -> None:
    bits = tensor((5, 64), dtype)
    values = to_float32(bits, dtype).copy()
    values[2, 3] = values[4, 0] = values[0, 60] = 0
    with_zeros = fake_quantized(from_float32(values, dtype), dtype, how)
    values[2, 3], values[4, 0], values[0, 60] = np.nan, np.inf, -np.inf
    bad = fake_quantized(from_float32(values, dtype), dtype, how)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(bad[finite], with_zeros[finite])
    np.testing.assert_array_equal(bad[~finite], values[~finite])


def test_a_factor_is_never_infinite() -> None:
    for amax in (0.0, 2.0**-149, 1e-40, 1.0, 3e38):
        for twice in (False, True):
            factor, scale = multiplied(amax, 448.0, twice)
            assert np.isfinite(factor).all() and np.isfinite(scale).all() and (factor > 0).all()
