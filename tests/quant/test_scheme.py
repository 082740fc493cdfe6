"""Schemes as data: what the files say, what a site gets, and what happens to a misspelled word."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bridge.core.dtypes import SEARCHED
from bridge.core.errors import SchemeError, UsageError
from bridge.core.values import AFFINE, Format, Site
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.catalog import kv_names, read_scheme, scheme_names
from bridge.quant.schemes.grammar import Gate
from bridge.quant.schemes.load import check_schemes, load_scheme
from bridge.quant.schemes.scheme import Rule
from bridge.verification.weight_error import compare

ALL = [
    "affine2", "affine3", "affine4", "affine5", "affine6", "affine8", "fp8", "fp8_block", "fp8_block_dynamic",
    "fp8_pc_pt", "int2:gptq", "int2:imatrix", "int2:rtn", "int2:signround", "int3:gptq", "int3:imatrix", "int3:rtn",
    "int3:signround", "int4:awq", "int4:gptq", "int4:imatrix", "int4:rtn", "int4:signround", "int4_awq",
    "int4_awq_clip", "int4_awq_full", "int4_gptq", "int4_mse", "int4_wo", "int5:imatrix", "int5:rtn",
    "int6:imatrix", "int6:rtn", "int8", "int8_pc_pt", "int8_sq", "int8_wo", "iq4_nl", "iq4_xs", "mxfp4", "mxfp4_wo",
    "mxfp4_wo:gptq", "mxfp4_wo:imatrix", "mxfp4_wo:rtn", "mxfp8", "mxfp8_wo", "nvfp4", "nvfp4:gptq",
    "nvfp4:imatrix", "nvfp4:mse", "nvfp4_act_headroom", "nvfp4_awq", "nvfp4_experts_only", "nvfp4_four_over_six",
    "nvfp4_gptq", "nvfp4_input_scale1", "nvfp4_local_hessian", "nvfp4_mlp_only", "nvfp4_mse", "nvfp4_wo",
    "nvfp4_wo:gptq", "nvfp4_wo:imatrix", "nvfp4_wo:mse", "nvfp4_wo_mse", "q2_k", "q3_k_l", "q3_k_m", "q3_k_s",
    "q4_0", "q4_0_imatrix", "q4_1", "q4_k", "q4_k_imatrix", "q4_k_m", "q4_k_s", "q5_0", "q5_1", "q5_k",
    "q5_k_imatrix", "q5_k_m", "q5_k_s", "q6_k", "q6_k_imatrix", "q8_0", "w4a8_awq", "w4a8_fp8", "w4a8_int8",
    "w4a8_nvfp4_fp8",
]  # fmt: skip
PLAIN = Site("m.q", "m.q.weight", "out_in", ("attn.q.weight",), 0)

GOOD = """
summary = "words"
[[weight]]
dtype = "int8"
per   = "channel"
[parity.tensor]
cosine = 0.9
norm   = [0.9, 1.1]
[parity.output]
cosine = 0.9
norm   = [0.9, 1.1]
"""


def test_the_schemes_of_the_design_are_there_and_hold_together() -> None:
    assert scheme_names() == ALL
    assert kv_names() == ["fp8", "fp8_cast", "int8", "nvfp4", "nvfp4_cast"]
    assert check_schemes() == []


@pytest.mark.parametrize(
    ("alias", "name"), [("int8-weight-only", "int8_wo"), ("int4-weight-only", "int4_awq"), ("float8", "fp8")]
)
def test_seed_words_name_schemes(alias: str, name: str) -> None:
    assert load_scheme(alias) == load_scheme(name)


def test_only_schemes_with_static_activations_pre_scales_importance_or_chosen_codes_need_calibration() -> None:
    needing = {name for name in ALL if load_scheme(name).needs_calibration}
    weighted = {name for name in ALL if name.endswith(("imatrix", ":gptq", ":signround"))} - {
        "nvfp4:imatrix",
        "nvfp4:gptq",
    }
    fp4 = {name for name in ALL if "nvfp4" in name and load_scheme(name).input} - {"nvfp4_input_scale1"}
    int4 = {"int4:awq", "int4_awq", "int4_awq_clip", "int4_awq_full", "int4_gptq", "w4a8_awq"}
    assert needing == {"fp8", "int8", "int8_sq"} | int4 | fp4 | weighted
    assert not any(load_scheme(name).needs_modelopt for name in weighted)
    assert load_scheme("int8_wo", kv="fp8").needs_calibration
    assert not any(load_scheme("int8_wo", kv=kv).needs_calibration for kv in ("fp8_cast", "nvfp4_cast"))


def test_mx_blocks_and_chosen_scales_of_fp4_are_simulated_with_cuda_alone(tmp_path: Path) -> None:
    searched = ("mse", "six", "gptq", "hessian", "imatrix")
    chosen = {name for name in ALL if name.startswith("nvfp4") and name.endswith(searched)}
    for name in ALL:
        assert bool(load_scheme(name).simulation_needs_cuda) == (name.startswith("mx") or name in chosen), name
    assert len(chosen) == 11
    for scheme, needs in (("nvfp4_wo", False), ("nvfp4_wo_mse", True)):
        (tmp_path / "own.toml").write_text(f'base = "fp8"\n[[rule]]\nmodules = ["*.q"]\nquant = "{scheme}"\n')
        assert bool(load_scheme(str(tmp_path / "own.toml")).simulation_needs_cuda) == needs


def test_gates_are_two_sided_and_a_dropped_scale_fails_them() -> None:
    for name in ALL:
        parity = load_scheme(name).parity
        for gate in (parity.tensor, parity.output):
            assert gate.norm[0] > 0.5 and gate.norm[1] < 2, f"{name}: a factor of two would pass"


def test_gates_of_weights_stand_near_what_a_scheme_loses() -> None:
    random = np.random.default_rng(0)
    weight = random.standard_t(3, (256, 512)).astype(np.float32)
    importance = random.lognormal(0, 2, 512).astype(np.float32)
    for scheme in map(load_scheme, ALL):
        if scheme.weight[0].dtype in SEARCHED:  # test_kquants.py and test_imatrix.py of tests/targets/gguf
            continue
        if scheme.weight[0].dtype in AFFINE:  # tests/targets/mlx/test_codes.py
            continue
        name = scheme.name
        numeric, gate = scheme.format.weight, scheme.parity.tensor
        inputs = importance if scheme.format.watched else None
        sums = compare(weight, "float32", encode(weight, "float32", numeric, importance=inputs), numeric)
        assert gate.norm[0] <= sums.norm_ratio <= gate.norm[1], name
        # INT8 per channel lies furthest from its gate, 8 times; all others 4 times at most
        assert sums.cosine >= gate.cosine >= 1 - 10 * (1 - sums.cosine), name


def test_format_of_keeps_what_the_architecture_keeps() -> None:
    scheme = load_scheme("fp8")
    assert scheme.format_of(PLAIN) == Format(scheme.weight, scheme.input, "max")
    assert scheme.format_of(replace(PLAIN, keep="output head")) == "output head"


@pytest.mark.parametrize("site", [replace(PLAIN, expert=3), replace(PLAIN, layout="conv")])
def test_experts_and_convolutions_are_neither_smoothed_nor_clipped_nor_compensated(site: Site) -> None:
    names = ("int8", "int8_sq", "int4_awq", "int4_awq_clip", "int4_awq_full", "w4a8_awq", "int4_gptq", "nvfp4_awq")
    for name in (*names, "nvfp4_local_hessian"):
        form = load_scheme(name).format_of(site)
        assert isinstance(form, Format) and not (form.prescales or form.clipped or form.chosen)
        assert form.weight == load_scheme(name).weight


def test_a_scheme_that_names_modules_leaves_the_others_and_a_rule_overrides_it() -> None:
    scheme = load_scheme("nvfp4_mlp_only")
    inside = replace(PLAIN, module="model.layers.0.mlp.up_proj")
    assert scheme.format_of(inside) == load_scheme("nvfp4").format_of(inside)
    assert scheme.format_of(PLAIN).startswith("scheme: only *mlp*, ")
    rule = Rule("rule 1", "fp8", load_scheme("fp8").format, None, modules=("m.q",))
    assert replace(scheme, rules=(rule,)).format_of(PLAIN) == load_scheme("fp8").format


def test_unknown_names_tell_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'fp9' is unknown.*nearest: fp8"):
        load_scheme("fp9")
    with pytest.raises(
        UsageError, match=r"kv='fp9' is unknown; known: fp8, fp8_cast, int8, nvfp4, nvfp4_cast; nearest: fp8"
    ):
        load_scheme("fp8", kv="fp9")


def test_digest_follows_what_is_calibrated_and_nothing_else() -> None:
    scheme = load_scheme("fp8")
    assert replace(scheme, name="x", summary="y", parity=load_scheme("nvfp4").parity).digest == scheme.digest
    same = {"nvfp4:mse", "nvfp4_wo:mse", "mxfp4_wo:rtn"}  # as nvfp4_mse, nvfp4_wo_mse and mxfp4_wo
    assert len({load_scheme(name).digest for name in ALL}) == len(ALL) - len(same)
    assert load_scheme("fp8", kv="fp8").digest != scheme.digest
    assert replace(load_scheme("int8"), options=(("alpha", 0.5),)).digest != load_scheme("int8").digest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('sumary = "x"', "key `sumary` is unknown.*nearest: summary"),
        ('algorithm = "awk"', "algorithm 'awk' is unknown.*nearest: awq"),
        ("[options]\nalpha = 0.5", "key `alpha` is unknown"),
        ('algorithm = "smoothquant"\n[options]\nalpha = 2', r"alpha = 2; expected a number in \(0, 1\]"),
        ('[input]\ndtype = "fp8"\nper = "tensor"', "dtype = 'fp8' is unknown.*float8_e4m3fn"),
        ('[input]\ndtype = "int8"\nper = "row"', "per = 'row' is unknown"),
        ('[input]\ndtype = "int8"', "`per` is missing"),
        ('[input]\ndtype = "int8"\nper = "block"', "needs one or two sizes"),
        ('[input]\ndtype = "int8"\nper = "tensor"\nblock = [16]', "needs one or two sizes"),
        ('[input]\ndtype = "int8"\nper = "block"\nblock = [0]', "needs one or two sizes"),
        ('[input]\ndtype = "int8"\nper = "token"', "write dynamic = true"),
        ('[input]\ndtype = "int8"\nper = "tensor"\ndynamic = 1', "expected true or false"),
        (
            '[input]\ndtype = "int8"\nper = "tensor"\nconstant = -1',
            "constant = -1; expected the amax, a positive number",
        ),
        ('[input]\ndtype = "int8"\nper = "tensor"\nconstant = true', "constant = True; expected the amax"),
        (
            '[input]\ndtype = "float8_e4m3fn"\nper = "token"\ndynamic = true\nconstant = 448',
            "every scale is computed when the model runs; drop it",
        ),
        (
            '[[weight]]\ndtype = "int8"\nper = "channel"\nsearch = "mse"',
            "is for .* INT4 in blocks, not for int8 per channel",
        ),
        (
            '[[weight]]\ndtype = "int8"\nper = "channel"\nsearch = "best"',
            "search = 'best' is unknown; known: either, four_over_six, mse, positive",
        ),
        ('algorithm = "awq_clip"', "'awq_clip' clips INT4 in blocks along `in`, without .input. or search"),
        ('algorithm = "awq_clip"\n[options]\nmin_clip_ratio = 1', "min_clip_ratio = 1 clips nothing"),
        ('[policy]\nzero = "skip"', "zero = 'skip' is unknown; known: error, floor, peers"),
        ('only = "*mlp*"', "expected names or globs in quotes"),
        ("[parity.tensor]", "cannot be read as TOML"),
    ],
)
def test_every_wrong_word_is_an_error_that_names_the_file(tmp_path: Path, change: str, said: str) -> None:
    head = change if "[" not in change or change.startswith("algorithm") else ""
    tail = "" if head else change
    path = tmp_path / "mine.toml"
    lines = head.split("\n[")
    path.write_text(lines[0] + GOOD + tail + ("\n[" + lines[1] if len(lines) > 1 else ""))
    with pytest.raises(SchemeError, match=said) as raised:
        read_scheme(path)
    assert "mine.toml" in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('summary = "words"', "", "`summary` is missing"),
        ("[[weight]]", "[weight]", r"\[\[weight\]\] tables"),
        ("[parity.output]\ncosine = 0.9\nnorm   = [0.9, 1.1]", "", r"\[parity.tensor\] and \[parity.output\]"),
        ("norm   = [0.9, 1.1]\n[parity.output]", "norm   = [1.1, 1.2]\n[parity.output]", "norm around 1"),
        (
            "cosine = 0.9\nnorm   = [0.9, 1.1]\n[parity.output]",
            "cosine = 0.9\n[parity.output]",
            "expected `cosine` and",
        ),
    ],
)
def test_every_missing_part_is_an_error(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(SchemeError, match=said):
        read_scheme(path)


def test_the_loosest_gate_admits_what_either_admits() -> None:
    assert Gate(0.9, (0.8, 1.1)).loosest(Gate(0.95, (0.7, 1.05))) == Gate(0.9, (0.7, 1.1))


def test_loading_a_scheme_loads_no_framework() -> None:
    code = (
        "import sys; from bridge.quant.schemes.load import load_scheme; load_scheme('int4_awq');"
        "assert not {'torch', 'modelopt', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
