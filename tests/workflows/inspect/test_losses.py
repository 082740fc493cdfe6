"""Losses are the formulas in float64 over what fake quantization gives, however the tensor was cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from bridge.core.dtypes import SEARCHED, from_float32, to_float32
from bridge.core.mappings import table_files
from bridge.core.values import AFFINE, Encoding, Numeric
from bridge.quant.codec.decode import values
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.load import load_scheme
from bridge.workflows.inspect.routes import BLOCKWISE, QUANT_STATS
from bridge.workflows.inspect.statistics.coding import fake_quantized
from bridge.workflows.inspect.statistics.losses import LOSSES, LossSums, loss, losses
from bridge.workflows.inspect.statistics.quantization import RECIPES, Quantization, of_format, of_recipe, of_scheme
from bridge.workflows.inspect.statistics.values import STATISTICS
from bridge.workflows.inspect.te.stat_names import TENSOR_STATS

DTYPES = ["float32", "bfloat16", "float16"]
SCHEMES = sorted(path.stem for path in table_files("schemes") if path.stem != "kv")
SCALES = [name for name in LOSSES if name.startswith("scale")]
NVFP4 = Quantization((Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn"),))
INT8 = Quantization((Numeric("int8", "tensor"),), static=True)


def tensor(shape: tuple[int, ...], dtype: str, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 4, shape))
    x[..., ::7], x[..., 3::11] = 0, -0.0
    return from_float32(x.astype(np.float32), dtype)


def plain(x: np.ndarray, v: np.ndarray) -> dict[str, float]:
    x, v = x.astype(np.float64), v.astype(np.float64)
    error, q = np.square(v - x).sum(), np.square(x).sum()
    return {
        "underflows%": 100 * (np.count_nonzero(x) - np.count_nonzero(v)) / x.size,
        "overflows%": 0.0,
        "mse": error / x.size,
        "sqnr": 10 * math.log10(q / error),
        "cosine": (x * v).sum() / math.sqrt(q * np.square(v).sum()),
        "norm_ratio": math.sqrt(np.square(v).sum() / q),
        "max_error": np.abs(v - x).max(),
    }


def agree(sums: LossSums, wanted: dict[str, float], rtol: float = 2e-6) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(loss(sums, name), value, rtol=rtol, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_the_losses_of_float64(name: str, dtype: str) -> None:
    bits = tensor((2, 65, 256), dtype)
    for kind in ("weight", "activation"):
        if how := of_scheme(load_scheme(name), kind):
            sums = losses(bits, dtype, how)
            wanted = plain(to_float32(bits, dtype), fake_quantized(bits, dtype, how))
            if how.amax:
                wanted["overflows%"] = 100 * float((np.abs(to_float32(bits, dtype)) > how.amax).mean())
            agree(sums, wanted)
            searched = how.numeric[0].dtype in (*SEARCHED, *AFFINE)  # their scales stand between the codes
            assert all(math.isnan(loss(sums, stat)) == searched for stat in SCALES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["activation", "weight", "gradient"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 37), (129, 257)])
def test_every_recipe_has_the_losses_of_float64(dtype: str, recipe: str, kind: str, shape: tuple[int, int]) -> None:
    bits, how = tensor(shape, dtype), of_recipe(recipe, kind)
    bits[..., -1] = from_float32(np.full(1, 0.3, np.float32), dtype)[0]
    sums, x = losses(bits, dtype, how), to_float32(bits, dtype)
    wanted = plain(x, fake_quantized(bits, dtype, how)) if loss(sums, "mse") else {"sqnr": math.inf, "cosine": 1.0}
    agree(sums, wanted)


@pytest.mark.parametrize("numeric", [
    Numeric("int8", "channel"), Numeric("int4", "block", (128,)), NVFP4.numeric[0],
    Numeric("float8_e4m3fn", "block", (32,), "float8_e8m0fnu"), Numeric("float8_e4m3fn", "tensor"),
], ids=str)  # fmt: skip
def test_scales_are_those_that_are_stored(numeric: Numeric) -> None:
    bits = tensor((40, 256), "bfloat16")
    arrays = encode(bits, "bfloat16", (numeric,), coding=Encoding())
    scale = np.asarray(arrays["scale"]).reshape(1, -1)
    scale = scale if numeric.scale_dtype == "float32" else values(scale, numeric.scale_dtype)
    scale = scale.astype(np.float64) * arrays.get("scale_2", 1.0)
    sums = losses(bits, "bfloat16", Quantization((numeric,)))
    wanted = {"scale_min": scale.min(), "scale_max": scale.max(), "scale_std": np.log2(scale).std()}
    agree(sums, wanted)


def test_scales_of_a_weight_that_is_rounded_twice_are_those_of_its_codes() -> None:
    bits, int4 = tensor((40, 256), "bfloat16"), Numeric("int4", "block", (128,))
    twice, once = (
        losses(bits, "bfloat16", Quantization((int4, Numeric("float8_e4m3fn", "tensor")))),
        Quantization((int4,)),
    )
    agree(twice, {name: loss(losses(bits, "bfloat16", once), name) for name in SCALES})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", range(2, 8))
def test_parts_make_the_whole(dtype: str, parts: int) -> None:
    """Cut between blocks, and under one amax for all, since a part has its own otherwise."""
    rng, bits = np.random.default_rng(parts), tensor((96, 160), dtype)
    cuts = [0, *sorted(rng.integers(0, 97, parts - 1)), 96]
    amax = float(np.abs(to_float32(bits, dtype)).max())
    for how in (of_recipe("mxfp8", "activation"), NVFP4, INT8, of_recipe("fp8_delayed_scaling", "gradient")):
        whole, merged = losses(bits, dtype, how, amax=amax), LossSums()
        for first, last in itertools.pairwise(cuts):
            sent = losses(bits[first:last], dtype, how, amax=amax).vector()
            merged = merged.merged(LossSums.from_vector(sent))
        agree(merged, {name: loss(whole, name) for name in LOSSES if not name.endswith("std")}, 1e-6)
        np.testing.assert_allclose(loss(merged, "scale_std"), loss(whole, "scale_std"), rtol=1e-6, atol=1e-7)


def test_pieces_of_a_tensor_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, hows = tensor((200, 48), "float16"), (of_recipe("mxfp8", "weight"), NVFP4, INT8)
    whole = [losses(bits, "float16", how).vector() for how in hows]
    monkeypatch.setattr("bridge.workflows.inspect.statistics.coding.PIECE", 1000)
    for how, wanted in zip(hows, whole, strict=True):
        np.testing.assert_allclose(losses(bits, "float16", how).vector(), wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_columns_are_rows_of_the_transpose(dtype: str, recipe: str) -> None:
    bits, how = tensor((70, 3, 50), dtype), of_recipe(recipe, "activation")
    turned = np.ascontiguousarray(bits.reshape(-1, 50).T)
    found, wanted = losses(bits, dtype, how, columnwise=True), losses(turned, dtype, how)
    np.testing.assert_allclose(found.vector(), wanted.vector(), rtol=1e-6)
    rows = losses(bits, dtype, how)
    assert how.turns != np.allclose(found.vector(), rows.vector(), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_a_static_scale_overflows(dtype: str) -> None:
    x = np.array([[1, -2, 3, 4, -0.5, 0, 2, 8]], np.float32)
    bits = from_float32(x, dtype)
    sums = losses(bits, dtype, INT8, amax=2.0)
    assert loss(sums, "overflows%") == 100 * 3 / 8
    assert loss(sums, "max_error") == pytest.approx(6, abs=0.02)
    assert loss(losses(bits, dtype, INT8), "overflows%") == 0
    dynamic = replace(INT8, static=False)
    assert loss(losses(bits, dtype, dynamic, amax=2.0), "overflows%") == 0


def test_zeros_of_either_sign_do_not_underflow() -> None:
    x = np.array([[0.0, -0.0, 1e-11, -1e-11, 1.0, -1.0, 2.0, -2.0]], np.float32)
    for how in (INT8, NVFP4, of_format("FP8E4M3"), of_format("FP8E5M2"), of_recipe("mxfp8", "weight")):
        sums = losses(x, "float32", how)
        assert (sums.nonzero, sums.kept, loss(sums, "underflows%")) == (6, 4, 25)


def test_scales_of_small_blocks_are_raised() -> None:
    """The least e4m3 number is 2^-9 of the largest block's 448: blocks below it have a scale that is too large."""
    x = np.ones((1, 64), np.float32)
    x[0, 16:32], x[0, 32:48], x[0, 48:] = 1 / 448 / 512, 0.99 / 448 / 512, 0
    sums = losses(x, "float32", NVFP4)
    assert (sums.scales, sums.raised) == (3, 1)  # the last block has nothing to scale
    assert loss(sums, "scale_underflows%") == pytest.approx(100 / 3)
    assert loss(losses(x, "float32", of_recipe("mxfp8", "weight")), "scale_underflows%") == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [
    of_recipe("fp8_block_scaling", "weight"), of_recipe("mxfp8", "activation"), NVFP4,
    Quantization((Numeric("int8", "channel"),)), Quantization((Numeric("int4", "block", (128,)),)),
], ids=str)  # fmt: skip
def test_blocks_of_zeros_have_no_scale(how: Quantization, dtype: str) -> None:
    """A padded row would have the least or the largest."""
    bits = tensor((128, 256), dtype)
    padded = np.concatenate([bits, np.zeros_like(bits)])
    amax = float(np.abs(to_float32(bits, dtype)).max())
    found, wanted = losses(padded, dtype, how, amax=amax), losses(bits, dtype, how, amax=amax)
    assert found.scales == wanted.scales
    agree(found, {name: loss(wanted, name) for name in SCALES}, 1e-6)
    assert all(math.isnan(loss(losses(np.zeros_like(bits), dtype, how), name)) for name in SCALES)


def test_a_scale_of_1_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.workflows.inspect.statistics.coding.PIECE", 64)
    x = np.zeros((8, 32), np.float32)
    x[5, 3] = 448
    assert loss(losses(x, "float32", of_recipe("fp8_current_scaling", "weight")), "scale_max") == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_taken_as_zero(dtype: str, bad: float) -> None:
    x = to_float32(tensor((3, 64), dtype), dtype).copy()
    x[1, 5] = 0
    clean = from_float32(x, dtype)
    x[1, 5] = bad
    for how in (of_recipe(recipe, "gradient") for recipe in RECIPES):
        found = losses(from_float32(x, dtype), dtype, how)
        assert found == replace(losses(clean, dtype, how), not_finite=1.0)
        assert found.merged(LossSums()).not_finite == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_empty_and_zero_tensors(recipe: str) -> None:
    how = of_recipe(recipe, "activation")
    empty = losses(np.zeros((0, 16), np.float32), "float32", how)
    assert losses(np.zeros((3, 0), np.float32), "float32", how) == LossSums()
    assert empty == LossSums() and all(math.isnan(loss(empty, name)) for name in LOSSES)
    sums = losses(np.zeros((2, 16), np.float32), "float32", how)
    wanted = {"underflows%": 0, "mse": 0, "sqnr": math.inf, "cosine": 1, "norm_ratio": 1, "max_error": 0}
    assert {name: loss(sums, name) for name in wanted} == wanted
    some = losses(tensor((2, 16), "float32"), "float32", how)
    assert some.merged(empty) == some == empty.merged(some)


def test_large_and_small_numbers_keep_their_errors() -> None:
    base = tensor((4, 96), "float32")
    for power in (-100, 100):
        sums = losses(base * np.float32(2.0**power), "float32", of_format("FP8E4M3"))
        known = losses(base, "float32", of_format("FP8E4M3"))
        assert loss(sums, "sqnr") == pytest.approx(loss(known, "sqnr"), rel=1e-5)
        assert loss(sums, "max_error") == pytest.approx(loss(known, "max_error") * 2.0**power, rel=1e-5)


def test_a_config_knows_every_statistic() -> None:
    """It is read without kernels, so that it has the names again."""
    assert set(QUANT_STATS) == set(LOSSES)
    named = set(TENSOR_STATS) - {BLOCKWISE, "histogram"}
    assert named == set(STATISTICS)
