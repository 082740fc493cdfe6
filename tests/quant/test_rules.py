"""Schemes with a colon: names, and scales of either sign against ggml's, llm-compressor's and a search by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bridge.core.errors import SchemeError, SourceError, UsageError
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.blocks import grid
from bridge.quant.codec.decode import decode, values
from bridge.quant.codec.encode import encode
from bridge.quant.codec.search import CODES, SCALES, searched_scales
from bridge.quant.schemes.catalog import read_rule, scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.verification.weight_error import Comparer, StoredCodes, Tolerance, compare

WORDS = Encoding(packed="int32", scale_dtype="float16")
EITHER, POSITIVE = (Numeric("int4", "block", (32,), search=search) for search in ("either", "positive"))


def matrix(rows: int = 24, cols: int = 96, seed: int = 3) -> Any:
    random = np.random.default_rng(seed)
    return (random.standard_t(3, (rows, cols)) * random.lognormal(0, 1, (rows, 1))).astype(np.float32)


def stored_scales(arrays: dict[str, Any]) -> Any:
    return arrays["scale"].view(np.float16)


def test_the_scale_of_either_sign_is_that_of_ggmls_q4_0() -> None:
    gguf = pytest.importorskip("gguf")
    weight = matrix()
    arrays = encode(weight, "float32", (EITHER,), coding=WORDS)
    blocks = gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_0).reshape(-1, 18)
    theirs = np.ascontiguousarray(blocks[:, :2]).view(np.float16).reshape(24, 3)
    assert (theirs < 0).any() and (theirs > 0).any()
    np.testing.assert_array_equal(stored_scales(arrays), theirs)
    ours = decode(arrays, (EITHER,), weight.shape, coding=WORDS)
    # Q4_0 divides by the scale before it is rounded to float16, so that some codes are next to ours, never better
    wide = gguf.dequantize(blocks.reshape(24, -1), gguf.GGMLQuantizationType.Q4_0)
    assert (np.abs(ours - weight) <= np.abs(wide - weight) + 1e-6).all()
    assert (ours == wide).mean() > 0.98


def test_positive_scales_are_those_of_llm_compressor() -> None:
    weight, theirs = matrix(), Encoding(packed="int32", scale_dtype="float16", bound=7.5)
    plain = Numeric("int4", "block", (32,))
    for name, array in encode(weight, "float32", (plain,), coding=theirs).items():
        np.testing.assert_array_equal(encode(weight, "float32", (POSITIVE,), coding=WORDS)[name], array)


@pytest.mark.parametrize("numeric", [EITHER, POSITIVE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_searched_scales_have_the_least_weighted_error_of_those_tried(numeric: Numeric, dtype: str) -> None:
    weight, importance = matrix(), np.random.default_rng(5).lognormal(0, 2, 96).astype(np.float32)
    if dtype == "bfloat16":
        bits = (weight.view(np.uint32) >> 16).astype(np.uint16)
        weight = (bits.astype(np.uint32) << 16).view(np.float32)
    found = searched_scales(bits if dtype == "bfloat16" else weight, dtype, numeric, importance)
    blocks, weights = weight.reshape(24, 3, 32).astype(np.float64), importance.reshape(1, 3, 32).astype(np.float64)
    at = np.abs(blocks).argmax(-1, keepdims=True)
    extreme = np.take_along_axis(blocks, at, -1)
    extreme, full = (np.abs(extreme), 7.5) if numeric.search == "positive" else (extreme, -8)

    def error(codes: Any, scale: Any) -> Any:
        return (weights * (blocks - codes * scale) ** 2).sum(-1)

    tried = []
    for step in range(-15, 6):
        level = full + 0.2 * step * np.sign(full)
        codes = np.clip(np.rint(blocks * level / extreme), -8, 7)
        square = (weights * codes * codes).sum(-1, keepdims=True)
        best = (weights * blocks * codes).sum(-1, keepdims=True) / square
        tried.append(error(codes, best))
    least = np.min(tried, axis=0)
    nearest = np.clip(np.rint(blocks / found[..., None]), -8, 7)
    assert (error(nearest, found[..., None].astype(np.float64)) <= least * (1 + 1e-4)).all()
    plain = searched_scales(bits if dtype == "bfloat16" else weight, dtype, numeric, None)
    own = error(np.clip(np.rint(blocks / plain[..., None]), -8, 7), plain[..., None].astype(np.float64))
    assert least.mean() < 0.8 * own.mean()
    assert (found > 0).all() if numeric.search == "positive" else (found < 0).any()


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("packed", ["in", "int32"])
def test_a_negative_scale_is_stored_and_divided_by(scale_dtype: str, packed: str) -> None:
    weight, coding = matrix(), Encoding(packed=packed, scale_dtype=scale_dtype)
    arrays = encode(weight, "float32", (EITHER,), coding=coding)
    error = np.abs(decode(arrays, (EITHER,), weight.shape, coding=coding) - weight).reshape(24, 3, 32).max(-1)
    step = np.abs(weight).reshape(24, 3, 32).max(-1) / 8
    assert (error <= step * 1.01).all()  # half a step, and one where the other extreme saturates


def test_a_block_of_zeros_has_a_scale_and_codes_of_zero() -> None:
    weight = matrix()
    weight[2, 32:64] = 0
    for importance in (None, np.ones(96, np.float32)):
        arrays = encode(weight, "float32", (EITHER,), coding=WORDS, importance=importance)
        assert stored_scales(arrays)[2, 1] > 0
        assert not decode(arrays, (EITHER,), weight.shape, coding=WORDS)[2, 32:64].any()


@pytest.mark.parametrize("numeric", [EITHER, POSITIVE])
def test_a_block_whose_inputs_are_always_zero_has_the_scale_of_no_importance(numeric: Numeric) -> None:
    importance = np.ones(96, np.float32)
    importance[32:64] = 0
    searched = searched_scales(matrix(), "float32", numeric, importance)
    np.testing.assert_array_equal(searched[:, 1], searched_scales(matrix(), "float32", numeric, None)[:, 1])
    assert (searched[:, 0] != searched_scales(matrix(), "float32", numeric, None)[:, 0]).any()


def test_a_scale_that_its_dtype_does_not_hold_is_refused() -> None:
    with pytest.raises(SourceError, match=r"a scale does not fit its dtype; .*--dtype"):
        encode(matrix() * np.float32(1e8), "float32", (EITHER,), coding=WORDS)


def test_a_negative_scale_fails_the_proof_of_a_scheme_with_positive_ones() -> None:
    weight = matrix()
    for numeric, unusable in ((EITHER, False), (Numeric("int4", "block", (32,)), True), (POSITIVE, True)):
        made = encode(weight, "float32", (EITHER,), coding=WORDS)
        kind = StoredCodes((numeric,), grid(numeric, weight.shape, "out_in"), "int32", WORDS, None)
        for signed in (False, True):  # of a source's codes they may be negative where the layout has such
            sums = Comparer(kind, "float32", Tolerance(signed=signed)).rows(
                weight, made["codes"].view(np.uint8), made["scale"]
            )
            assert bool(sums.scales.unusable) == (unusable and not signed)


@pytest.mark.parametrize(("factor", "others"), [(0.5, 0), (2, 16)])
def test_two_scales_with_the_same_error_are_both_the_one_that_was_searched(factor: float, others: int) -> None:
    """The block of 1, 0.5, 1.5 has no error under 0.25 and 0.5, and one under 0.125, since codes end at 6."""
    numeric = Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn", search="weighted")
    weight = np.tile(np.array([1, 0.5, 1.5, 0], np.float32), (4, 16))
    weight[3, -16:], importance = 6 * 448, np.ones(64, np.float32)
    made = encode(weight, "float32", (numeric,), importance=importance)
    assert compare(weight, "float32", made, (numeric,), importance=importance).not_repeated == 0
    number = values(made["scale"][:1, :1], "float8_e4m3fn")[0, 0]
    codes, scale = made["codes"].copy(), made["scale"].copy()
    at = int(np.searchsorted(SCALES["float8_e4m3fn"], number / np.float32(factor)))
    scale[0, 0] = CODES["float8_e4m3fn"][at]
    sums = compare(weight, "float32", made | {"codes": codes, "scale": scale}, (numeric,), importance=importance)
    assert sums.not_repeated == others


def test_mxfp4_mse_takes_the_powers_of_two_with_the_least_error() -> None:
    weight, errors = matrix(), {}
    for name in ("mxfp4_wo", "mxfp4_wo:mse"):
        numerics = load_scheme(name).format.weight
        moved = decode(encode(weight, "float32", numerics), numerics, weight.shape) - weight
        errors[name] = (moved.astype(np.float64) ** 2).reshape(24, 3, 32).sum(-1)
    blocks = weight.reshape(24, 3, 32).astype(np.float64)
    tried = []
    for power in 2.0 ** np.arange(-12, 9):
        codes = np.clip(blocks / power, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
        tried.append(((codes.astype(np.float64) * power - blocks) ** 2).sum(-1))
    np.testing.assert_allclose(errors["mxfp4_wo:mse"], np.min(tried, axis=0), rtol=1e-5)  # sums in float32
    assert errors["mxfp4_wo:mse"].mean() < 0.95 * errors["mxfp4_wo"].mean()


def test_names_with_a_colon_are_schemes_in_any_case() -> None:
    names = [name for name in scheme_names() if ":" in name]
    fp4 = [f"{layout}:{rule}" for layout in ("nvfp4", "nvfp4_wo") for rule in ("gptq", "imatrix", "mse")]
    few = [f"int{bits}:{rule}" for bits in (2, 3) for rule in ("gptq", "imatrix", "rtn", "signround")]
    more = [f"int{bits}:{rule}" for bits in (5, 6) for rule in ("imatrix", "rtn")]
    assert names == [
        *few, "int4:awq", "int4:gptq", "int4:imatrix", "int4:rtn", "int4:signround", *more, "mxfp4_wo:gptq",
        "mxfp4_wo:imatrix", "mxfp4_wo:mse", *fp4,
    ]  # fmt: skip
    assert load_scheme("INT4:RTN") == load_scheme("int4:rtn")
    assert not load_scheme("int4:rtn").needs_calibration
    assert load_scheme("int4:gptq").needs_calibration and not load_scheme("int4:gptq").needs_modelopt
    assert load_scheme("int4:gptq").digest != load_scheme("int4_gptq").digest
    assert load_scheme("nvfp4:mse").digest == load_scheme("nvfp4_mse").digest
    assert load_scheme("nvfp4:gptq").needs_modelopt and not load_scheme("nvfp4_wo:gptq").needs_modelopt


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("int4:best", "a choice among rules .* here name the rule: int4:rtn, int4:imatrix, int4:gptq"),
        ("int4:bets", "int4 has no rule 'bets'; .*best"),
        ("int7:rtn", "'int7' is no layout that has rules; known: int2, int3, int4, int5, int6, mxfp4_wo, nvfp4"),
        ("int4:", "int4 has no rule ''"),
        ("int4", "here name the rule: .*int4:gptq"),
        ("INT4:Best", "here name the rule: .*int4:gptq"),
    ],
)
def test_an_unknown_rule_names_those_that_there_are(name: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        load_scheme(name)


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        ('algorithm = "imatrix"', "scales of INT2 to INT6 in blocks with search = 'either' or 'positive'"),
        ('search = "signed"', "search = 'signed' is unknown"),
        ("dtype = 1", "key `dtype` is unknown"),
    ],
)
def test_a_wrong_rule_is_an_error_that_names_it(tmp_path: Path, rule: str, match: str) -> None:
    words = '[[weight]]\ndtype = "int4"\nper = "block"\nblock = [64]\n'
    gates = "[parity.tensor]\ncosine = 0.9\nnorm = [0.9, 1.1]\n[parity.output]\ncosine = 0.9\nnorm = [0.9, 1.1]\n"
    (tmp_path / "odd.toml").write_text(f'summary = "odd"\n{words}{gates}[rule.odd]\n{rule}\n')
    with pytest.raises(SchemeError, match=rf"\[rule.odd\].*{match}"):
        read_rule(tmp_path / "odd.toml", "odd")
