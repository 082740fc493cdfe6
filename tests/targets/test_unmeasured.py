"""Scales that no data decide: casts of the KV cache, and input scales that a scheme fixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.core.dtypes import to_float32
from bridge.core.errors import PlanError, SchemeError
from bridge.core.formats.safetensors import SafetensorsFile
from tests.blocks import ROOT

LLAMA = ROOT / "examples" / "models" / "tiny-llama"
OUTPUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("hf", "nvfp4_input_scale1", {"format": "modelopt"}),
    ("hf", "nvfp4_input_scale1", {"format": "compressed-tensors"}),
    ("hf", "int8_wo", {"format": "modelopt"}),
    ("trtllm", "int8_wo", {}),
    pytest.param("trt", "int8_wo", {}, marks=pytest.mark.slow),
]
FIXED = ("k_scale", "v_scale", "kv_cache_scaling_factor", "input_scale", "input_global_scale")


@pytest.mark.parametrize(("target", "scheme", "options"), OUTPUTS)
def test_scales_that_no_data_decide_are_one_and_are_proved(
    target: str, scheme: str, options: dict[str, Any], tmp_path: Path
) -> None:
    report = bridge.convert(LLAMA, target, scheme, tmp_path / "out", kv="fp8_cast", progress=False, **options)
    assert report.passed and report.parity and not any("scale" in what for what in report.parity.not_run)
    assert not (tmp_path / "out" / "bridge").exists(), "no calibration"
    files = [SafetensorsFile(path) for path in (tmp_path / "out").glob("*.safetensors")]
    fixed = {
        name: to_float32(file.read(name), spec.dtype)
        for file in files
        for name, spec in file.specs.items()
        if name.endswith(FIXED)
    }
    assert len({name.rpartition(".")[2] for name in fixed}) >= 1 + (scheme != "int8_wo")
    assert all((scale == 1).all() for scale in fixed.values())


@pytest.mark.parametrize("target", ["hf", "trt", "trtllm", "gguf"])
def test_a_cast_cache_is_refused_where_a_measured_one_is(target: str) -> None:
    for cast, measured in (("fp8_cast", "fp8"), ("nvfp4_cast", "nvfp4")):
        said = []
        for kv in (cast, measured):
            try:
                bridge.plan(LLAMA, target, "int8_wo", kv=kv)
                said.append("")
            except (PlanError, SchemeError) as error:
                said.append(str(error))
        assert said[0] == said[1]


@pytest.mark.parametrize("program", ["vllm", "trtllm"])
def test_programs_load_fixed_scales_as_they_load_measured_ones(program: str) -> None:
    for scheme, kv in (("nvfp4_input_scale1", "fp8_cast"), ("nvfp4", "fp8")):
        notes = bridge.plan(LLAMA, "hf", scheme, kv=kv, runtime=program).notes
        assert any(note.startswith("for ") and "--format modelopt" in note for note in notes)
