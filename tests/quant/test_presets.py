"""Names of other tools: `ct:W4A16`, `modelopt:INT8_DEFAULT_CFG`, and whose numbers they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.errors import BridgeError, UsageError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.quant.schemes.load import check_schemes, load_scheme
from bridge.quant.schemes.presets import prefixes, preset_names
from bridge.targets.manifest import load_manifest
from tests.oracles import llm_compressor_golden

TINY = "examples/models/tiny-llama"
STRATEGY = {"group": "block", "tensor_group": "block"}
CT = [name for name in preset_names() if name.startswith("ct:")]


def test_every_preset_of_compressed_tensors_has_a_row() -> None:
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    assert prefixes()["ct"]["preset"].keys() == PRESET_SCHEMES.keys()
    assert check_schemes() == []


@pytest.mark.parametrize("name", CT)
def test_a_preset_is_what_compressed_tensors_says(name: str) -> None:
    from compressed_tensors.quantization import preset_name_to_scheme

    theirs, scheme = preset_name_to_scheme(name.removeprefix("ct:"), ["Linear"]), load_scheme(name)
    assert scheme.rounding == "llm-compressor" and scheme.algorithm == "max"
    for args, numeric in ((theirs.weights, scheme.weight[0]), (theirs.input_activations, scheme.input)):
        if args is None or numeric is None:
            assert args is None and numeric is None
            continue
        assert numeric.dtype.startswith(f"{args.type}{args.num_bits}")
        assert STRATEGY.get(str(args.strategy), str(args.strategy)) == numeric.per
        assert args.group_size in (None, *numeric.block)
        assert args.block_structure in (None, [*numeric.block])
        assert bool(args.dynamic) == numeric.dynamic


def test_every_config_of_modelopt_has_a_row() -> None:
    config = pytest.importorskip("modelopt.torch.quantization.config")
    named = {name for name in vars(config) if name.endswith("_CFG")}
    assert prefixes()["modelopt"]["preset"].keys() == named


@pytest.mark.parametrize("name", sorted(prefixes()["modelopt"]["preset"]))
def test_names_of_modelopt_need_no_prefix(name: str) -> None:
    if f"modelopt:{name}" in preset_names():
        assert load_scheme(name) == load_scheme(f"modelopt:{name.lower()}")
        return
    with pytest.raises(UsageError, match=r"^quant='modelopt:"):
        load_scheme(f"modelopt:{name}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ct:W4A16:best", "stands before a preset of compressed-tensors, which takes no rule; write ct:W4A16"),
        ("modelopt:INT8_DEFAULT_CFG:rtn", "which takes no rule"),
        ("ct:int4:gptq", "which takes no rule; write one of our own names"),
        ("ct:W4A17", "compressed-tensors has no preset 'W4A17'"),
        ("ct:W2A4", "no layout here has INT4 inputs, which vLLM runs with Humming alone"),
        ("W4A16", "another tool's name: write ct:W4A16, .*int4:gptq"),
        ("W8A16", "another tool's name: write ct:W8A16, .*int8_wo"),
        ("modelopt:FP8_KV_CFG", "format of the KV cache"),
    ],
)
def test_a_name_that_is_no_scheme_is_one_error(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as told:
        load_scheme(name)
    assert str(told.value).startswith(f"quant={name!r}")


@pytest.mark.parametrize("name", CT)
def test_a_preset_plans_compressed_tensors_or_says_why_not(name: str) -> None:
    try:
        plan = bridge.plan(TINY, "hf", name)
    except BridgeError as error:
        assert name in str(error) and name.removeprefix("ct:") in ("W4A8", "W4AFP8", "MXFP4XFP8")
        return
    assert (plan.scheme, plan.options["format"]) == (name, "compressed-tensors")
    assert {step.format.rounding for step in plan.quantized if step.format} == {"llm-compressor"}
    assert any(note.startswith("format compressed-tensors (--format): ") for note in plan.notes)


@pytest.mark.parametrize(("target", "options"), [("trt", {}), ("gguf", {}), ("hf", {"format": "awq"})])
def test_a_preset_goes_nowhere_else(target: str, options: Any) -> None:
    with pytest.raises(BridgeError, match="of llm-compressor"):
        bridge.plan(TINY, target, "ct:W4A16", **options)


@pytest.mark.parametrize("scheme", ["int8_wo", "int4_wo", "nvfp4_wo"])
def test_a_name_of_modelopt_has_its_numbers_in_every_format(tmp_path: Path, scheme: str) -> None:
    source = llm_compressor_golden.write_source(tmp_path / "source", "float32")
    found = {}
    for form in ("modelopt", "compressed-tensors"):
        bridge.convert(source, "hf", scheme, tmp_path / form, format=form, verify=False, progress=False)
        found[form] = SafetensorsFile(tmp_path / form / "model.safetensors")
    theirs, ours = found.values()
    module = "model.layers.1.mlp.down_proj."
    scales = [file.read(f"{module}weight_scale") for file in (theirs, ours)]
    assert scales[0].ravel().tobytes() == scales[1].ravel().tobytes()
    if scheme == "nvfp4_wo":
        assert np.array_equal(theirs.read(f"{module}weight"), ours.read(f"{module}weight_packed"))
        above = theirs.read(f"{module}weight_scale_2"), ours.read(f"{module}weight_global_scale")
        assert np.float32(1) / above[0].ravel() == above[1].ravel()
        return
    from bridge.sources.opening import open_source

    values = [open_source(tmp_path / form).read(f"{module}weight") for form in found]
    assert np.array_equal(*values)


def test_a_record_from_before_there_were_presets_is_verified_by_its_own_rounding(tmp_path: Path) -> None:
    """It names no rounding: amax / 7.5 stands in `bound` of each step."""
    out = tmp_path / "out"
    source = llm_compressor_golden.write_source(tmp_path / "source")
    bridge.convert(source, "hf", "ct:W4A16", out, verify=False, progress=False)
    record = out / "bridge.json"
    assert record.read_text().count('"rounding": "llm-compressor"') == 14
    text = record.read_text().replace(', "rounding": "llm-compressor"', "")
    plan = {**json.loads(text)["plan"]}
    from bridge.core.parsing.typed_json import typed
    from bridge.planning.plan import Plan

    older = typed(Plan, plan).digest
    record.write_text(text.replace(load_manifest(out).plan.digest, older))
    assert load_manifest(out).plan.quantized[0].format.rounding == ""  # type: ignore[union-attr]
    assert bridge.verify(out, against=source).passed


@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        ("fp8", "modelopt"), ("int4:rtn", "compressed-tensors"), ("int4:gptq", "compressed-tensors"),
        ("nvfp4_wo:gptq", "modelopt"), ("nvfp4:gptq", "modelopt"), ("mxfp4_wo:gptq", "compressed-tensors"),
    ],
)  # fmt: skip
def test_hf_takes_the_first_format_that_holds_a_scheme_and_that_a_program_loads(scheme: str, form: str) -> None:
    plan = bridge.plan(TINY, "hf", scheme)
    told = [note for note in plan.notes if note.startswith("format ")]
    assert plan.options["format"] == form and bool(told) is (form != "modelopt")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("W4A4", "no program multiplies INT4 by INT4"),
        ("w3a16", "write ct:W3A16"),
        ("w7a16", "no layout here has INT7"),
        ("W8A16", "write ct:W8A16"),
    ],
)
def test_a_bare_name_is_answered_with_what_can_be_written(name: str, why: str) -> None:
    with pytest.raises(BridgeError, match=why):
        bridge.plan(TINY, "hf", name)


def test_a_preset_that_no_format_holds_says_why() -> None:
    with pytest.raises(BridgeError, match=r"inputs in blocks of \(128,\) do not match weights"):
        bridge.plan(TINY, "hf", "ct:MXFP4XFP8")
