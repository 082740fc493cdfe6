"""INT4 by our rules in every target: proved against the source, and read by other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.dtypes import to_float32
from bridge.core.errors import PlanError, SourceError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.values import Encoding, Numeric
from bridge.quant.calibration import Calibration, Provenance
from bridge.quant.codec.blocks import grid
from bridge.quant.codec.encode import encode
from bridge.sources.opening import open_source
from bridge.targets.manifest import load_manifest
from bridge.verification.weight_error import Comparer, StoredCodes
from tests.blocks import ROOT

LLAMA = ROOT / "examples" / "models" / "tiny-llama"
RULES = ("int4:rtn", "int4:imatrix", "int4:gptq")  # the last: tests/calibration/test_columns.py
EITHER = [
    ("hf", {"format": "compressed-tensors"}), ("hf", {"format": "awq"}), ("hf", {"format": "gptq"}), ("gguf", {}),
    ("ort", {}),
]  # fmt: skip
POSITIVE = [("hf", {"format": "modelopt"}), ("trtllm", {})]
GRAPHS = [pytest.param(target, {}, marks=pytest.mark.product) for target in ("trt", "tripy")]
SAID = "scales stay positive"


@pytest.fixture(scope="module")
def importance() -> Calibration:
    """An importance of every input of tiny-llama, the same for those that read one input."""
    source, random = open_source(LLAMA), np.random.default_rng(4)
    shapes = {name.removesuffix(".weight"): spec.shape for name, spec in source.specs.items() if "_proj" in name}
    drawn: dict[str, Any] = {}
    for name, (_, inner) in shapes.items():
        group = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        drawn[name] = drawn.setdefault(group, random.lognormal(0, 2, inner).astype(np.float32))
    return Calibration(Provenance("", "", "", "", "", "", 0, 0), input_square=drawn)


def scales_of(directory: Path) -> Any:
    """The scales of a safetensors output, and whether any is negative."""
    files = [SafetensorsFile(path) for path in directory.glob("*.safetensors")]
    found = [
        to_float32(file.read(name), spec.dtype)
        for file in files
        for name, spec in file.specs.items()
        if name.endswith(("weight_scale", ".scales", "weights_scaling_factor"))
    ]
    return np.concatenate([scale.reshape(-1) for scale in found])


@pytest.mark.slow
@pytest.mark.parametrize("quant", [name for name in RULES if name != "int4:gptq"])
@pytest.mark.parametrize(("target", "options"), [*EITHER, *POSITIVE, *GRAPHS])
def test_rules_are_proved_in_every_target(
    target: str, options: dict[str, Any], quant: str, importance: Calibration, tmp_path: Path
) -> None:
    calib = importance if quant == "int4:imatrix" else None
    report = bridge.convert(LLAMA, target, quant, tmp_path / "out", calib=calib, progress=False, **options)
    assert report.passed and report.parity and not report.findings
    signed = (target, options) in EITHER
    assert any(SAID in note for note in report.notes) != signed
    if target in ("hf", "trtllm"):
        scales = scales_of(tmp_path / "out")
        assert np.isfinite(scales).all() and scales.all()
        assert (scales < 0).mean() > 0.4 if signed else (scales > 0).all()


def test_codes_searched_with_another_importance_are_noticed() -> None:
    random, numeric = np.random.default_rng(1), Numeric("int4", "block", (32,), search="either")
    weight = random.standard_normal((16, 96)).astype(np.float32)
    right, other = (random.lognormal(0, 2, 96).astype(np.float32) for _ in range(2))
    coding = Encoding(packed="int32", scale_dtype="float16")
    made = encode(weight, "float32", (numeric,), coding=coding, importance=right)
    kind = StoredCodes((numeric,), grid(numeric, weight.shape, "out_in"), "int32", coding, None)
    for importance, wrong in ((right, False), (other, True)):
        sums = Comparer(kind, "float32").rows(weight, made["codes"].view(np.uint8), made["scale"], importance)
        assert bool(sums.not_repeated) == wrong and sums.repeated == weight.size and not sums.not_nearest


@pytest.mark.slow
@pytest.mark.parametrize("block", [128, 64, 32])
def test_transformers_computes_with_negative_scales(block: int, tmp_path: Path) -> None:
    """compressed-tensors' own decompression of the file gives our decoded weights, and the logits of both agree."""
    torch = pytest.importorskip("torch")
    from dataclasses import replace

    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    from bridge.quant.schemes.load import load_scheme
    from bridge.targets.hf.runtime import Rebuilt

    scheme = load_scheme("int4:rtn")
    scheme = replace(scheme, weight=(replace(scheme.weight[0], block=(block,)),))
    bridge.convert(LLAMA, "hf", scheme, tmp_path / "out", format="compressed-tensors", verify=False, progress=False)
    assert (scales_of(tmp_path / "out") < 0).any()
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=CompressedTensorsConfig(run_compressed=False), dtype=torch.float32
    )
    ours, compared = Rebuilt(tmp_path / "out", load_manifest(tmp_path / "out").plan), 0
    model = open_source(LLAMA).load_model().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.copy_(torch.from_numpy(to_float32(ours.read(name), ours.specs[name].dtype)))
                compared += 1
        ids = torch.arange(3, 43)[None]
        want, got = model(input_ids=ids).logits, loaded(input_ids=ids).logits
    # its products of codes and scales are rounded to the scale's dtype, bfloat16
    assert compared == 35 and float((got - want).norm() / want.norm()) < 2**-6


def test_negative_scales_of_a_source_are_copied_where_they_are_read(tmp_path: Path) -> None:
    """AutoRound's files: half of the scales are negative. A layout without such refuses them, dequantizing does not."""
    for format_ in ("gptq", "compressed-tensors"):
        made, copied = tmp_path / f"{format_} made", tmp_path / f"{format_} copied"
        bridge.convert(LLAMA, "hf", "int4:rtn", made, format=format_, verify=False, progress=False)
        report = bridge.convert(made, "hf", out=copied, format="compressed-tensors", progress=False)
        assert report.passed
        assert np.array_equal(*(np.sort(scales_of(path)) for path in (made, copied)))
    assert (made / "model.safetensors").read_bytes() == (copied / "model.safetensors").read_bytes()
    with pytest.raises(
        SourceError, match=r"below zero, which no program reads.*--format compressed-tensors.*--quant none"
    ):
        bridge.convert(made, "trtllm", out=tmp_path / "trtllm", progress=False)
    plain = bridge.convert(made, "hf", "none", tmp_path / "plain", progress=False)
    assert plain.passed and "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_a_program_that_reads_positive_scales_alone_gets_them() -> None:
    plan = bridge.plan(LLAMA, "edgellm", "int4:rtn")
    assert any(note.endswith("the program takes no others") for note in plan.notes)
    assert plan.scheme_digest == bridge.plan(LLAMA, "vllm", "int4:rtn").scheme_digest
    assert {step.format.weight[0].search for step in plan.quantized if step.format} == {"positive"}
    plan = bridge.plan(LLAMA, "vllm", "int4:rtn")
    assert {step.format.weight[0].search for step in plan.quantized if step.format} == {"either"}


def test_copied_codes_have_no_place_in_ggmls_blocks(tmp_path: Path) -> None:
    """Which hold the scales between the codes: a plan passed, and the writer failed."""
    bridge.convert(LLAMA, "hf", "int4_wo", tmp_path / "made", verify=False, progress=False)
    with pytest.raises(PlanError, match=r"codes are not copied into ggml's blocks.*\n?.*--quant none"):
        bridge.plan(tmp_path / "made", "gguf")
