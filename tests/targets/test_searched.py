"""Weights whose block scales are searched: every target that takes the plain scheme takes them, and they err less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.core.errors import SchemeError
from bridge.core.formats.safetensors import SafetensorsFile
from tests.blocks import ROOT

LLAMA = ROOT / "examples" / "models" / "tiny-llama"
PLAIN = {"int4_mse": "int4_wo", "nvfp4_wo_mse": "nvfp4_wo"}
OUTPUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("hf", "int4_mse", {"format": "modelopt"}),
    ("hf", "int4_mse", {"format": "compressed-tensors"}),
    ("hf", "int4_mse", {"format": "awq"}),
    ("hf", "nvfp4_wo_mse", {"format": "modelopt"}),
    ("hf", "nvfp4_wo_mse", {"format": "compressed-tensors"}),
    ("trtllm", "int4_mse", {}),
    ("gguf", "int4_mse", {}),
    ("gguf", "nvfp4_wo_mse", {}),
]
GRAPHS = [("trt", "int4_mse"), ("trt", "nvfp4_wo_mse"), ("ort", "int4_mse"), ("tripy", "int4_mse")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "scheme", "options"), [*OUTPUTS, *(pytest.param(*row, {}, marks=pytest.mark.product) for row in GRAPHS)]
)
def test_searched_scales_are_proved_and_err_less_than_amax(
    target: str, scheme: str, options: dict[str, Any], tmp_path: Path
) -> None:
    errors = []
    for name in (scheme, PLAIN[scheme]):
        report = bridge.convert(LLAMA, target, name, tmp_path / name, progress=False, **options)
        assert report.passed and report.parity and not report.findings
        rows = [tensor for tensor in report.parity.tensors if tensor.cosine < 1]
        errors.append(sum(1 - tensor.cosine for tensor in rows) / len(rows))
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("scheme", PLAIN)
def test_an_output_has_the_tensors_and_config_of_the_plain_scheme(scheme: str, tmp_path: Path) -> None:
    for name in (scheme, PLAIN[scheme]):
        bridge.convert(LLAMA, "hf", name, tmp_path / name, verify=False, progress=False)
    ours, plain = (tmp_path / name for name in (scheme, PLAIN[scheme]))
    assert (ours / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    files = [SafetensorsFile(path / "model.safetensors").specs for path in (ours, plain)]
    assert files[0] == files[1]


def test_codes_of_searched_scales_are_copied_and_decoded(tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "nvfp4_wo_mse", tmp_path / "first", verify=False, progress=False)
    report = bridge.convert(tmp_path / "first", "hf", None, tmp_path / "again", progress=False)
    assert report.passed
    first, again = (SafetensorsFile(tmp_path / name / "model.safetensors") for name in ("first", "again"))
    assert all(first.read(name).tobytes() == again.read(name).tobytes() for name in first.specs)


def test_a_searched_scheme_needs_scales_of_blocks(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    text = (ROOT / "mappings" / "schemes" / "int8_wo.toml").read_text()
    recipe.write_text(text.replace('per   = "channel"', 'per   = "channel"\nsearch = "mse"'))
    with pytest.raises(SchemeError, match=r"is for FP4 in blocks under FP8 scales \(NVFP4\) and INT4 in blocks, not"):
        bridge.plan(LLAMA, "hf", recipe)
