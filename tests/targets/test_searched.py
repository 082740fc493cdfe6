"""Weights whose block scales are searched: every target that takes the plain scheme takes them, and they err less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.dtypes import to_float32
from bridge.core.errors import CalibrationError, SchemeError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.quant.calibration import Calibration, Provenance
from bridge.sources.opening import open_source
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


@pytest.mark.slow
@pytest.mark.parametrize("scheme", PLAIN)
def test_an_output_has_the_tensors_and_config_of_the_plain_scheme(scheme: str, tmp_path: Path) -> None:
    for name in (scheme, PLAIN[scheme]):
        bridge.convert(LLAMA, "hf", name, tmp_path / name, verify=False, progress=False)
    ours, plain = (tmp_path / name for name in (scheme, PLAIN[scheme]))
    assert (ours / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    files = [SafetensorsFile(path / "model.safetensors").specs for path in (ours, plain)]
    assert files[0] == files[1]


@pytest.fixture(scope="module")
def clipped() -> Calibration:
    """Clips of every block of tiny-llama, all different."""
    source, rng = open_source(LLAMA), np.random.default_rng(4)
    shapes = {name.removesuffix(".weight"): spec.shape for name, spec in source.specs.items() if "_proj" in name}
    clips = {name: rng.uniform(0.8, 1, (out, -(-in_ // 128))).astype(np.float32) for name, (out, in_) in shapes.items()}
    return Calibration(Provenance("", "", "", "", "", "", 0, 0), weight_clip=clips)


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["modelopt", "compressed-tensors", "awq", "gptq"])
def test_clipped_scales_are_written_as_those_of_int4_wo(format_: str, clipped: Calibration, tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "int4_wo", tmp_path / "plain", verify=False, progress=False, format=format_)
    bridge.convert(LLAMA, "hf", "int4_awq_clip", tmp_path / "ours", calib=clipped, progress=False, format=format_)
    ours, plain = (tmp_path / name for name in ("ours", "plain"))
    assert (ours / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    assert all(
        SafetensorsFile(path).specs == SafetensorsFile(plain / path.name).specs for path in ours.glob("*.safetensors")
    )


@pytest.mark.slow
def test_clipped_scales_are_the_same_numbers_in_compressed_tensors_and_gptq(
    clipped: Calibration, tmp_path: Path
) -> None:
    for format_ in ("compressed-tensors", "gptq"):
        out, quiet = tmp_path / format_, {"verify": False, "progress": False}
        bridge.convert(LLAMA, "hf", "int4_awq_clip", out, calib=clipped, format=format_, **quiet)
    ours, gptq = (SafetensorsFile(tmp_path / name / "model.safetensors") for name in ("compressed-tensors", "gptq"))
    for module in clipped.weight_clip:
        scale, theirs = ours.read(f"{module}.weight_scale"), gptq.read(f"{module}.scales").T
        own = to_float32(scale, ours.specs[f"{module}.weight_scale"].dtype)
        theirs = to_float32(np.ascontiguousarray(theirs), gptq.specs[f"{module}.scales"].dtype)
        np.testing.assert_array_equal(own.astype(np.float16), theirs)  # GPTQ's are float16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("trtllm", {}),
        ("gguf", {}),
        *(pytest.param(target, {}, marks=pytest.mark.product) for target in ("trt", "ort", "tripy")),
    ],
)
def test_clipped_scales_are_proved_in_every_target(
    target: str, options: dict[str, Any], clipped: Calibration, tmp_path: Path
) -> None:
    report = bridge.convert(LLAMA, target, "int4_awq_clip", tmp_path / "out", calib=clipped, progress=False, **options)
    assert report.passed and report.parity and not report.findings


def test_blocks_along_out_have_no_clips(clipped: Calibration) -> None:
    with pytest.raises(SchemeError, match="clips are of blocks along `in`"):
        bridge.plan(LLAMA, "tripy", "int4_awq_clip", linear=True)


def test_clips_of_another_model_are_refused(clipped: Calibration, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    wrong = replace(clipped, weight_clip={**clipped.weight_clip, name: clipped.weight_clip[name][:-1]})
    with pytest.raises(CalibrationError, match=r"q_proj: clips of blocks \(\d+, \d\), and the weight has"):
        bridge.convert(LLAMA, "hf", "int4_awq_clip", tmp_path / "out", calib=wrong, progress=False)
    lacking = replace(clipped, weight_clip={})
    with pytest.raises(CalibrationError, match="clip of the blocks of the weight: "):
        bridge.convert(LLAMA, "hf", "int4_awq_clip", tmp_path / "out", calib=lacking, progress=False)


@pytest.mark.slow
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
