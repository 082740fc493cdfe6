"""FP8 per tensor: what servers do to fused matrices when they load them changes no code."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bridge
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration, Provenance
from tests.covering import grid
from tests.oracles import export_oracle as oracle

# Names of what vLLM 0.33 loads into one matrix: `packed_modules_mapping` of its models, and w1 and w3 of experts.
FUSED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip
FAMILIES = ("llama", "qwen2", "gemma3", "phi", "opt", "cohere", "mixtral", "qwen3-moe", "deepseek-v3")
E4M3 = torch.float8_e4m3fn


def calibration(plan: Plan) -> Calibration:
    """The same input amax for every module."""
    amax = {step.site.module: np.array(3.0, np.float32) for step in plan.quantized if step.site}
    return Calibration(Provenance("", "", "", "", "", "", 0, 0), amax)


def converted(family: str, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    source = oracle.source(family, "bf16")
    plan = bridge.plan(source, "hf", "fp8", **options)
    bridge.convert(source, "hf", "fp8", out, calib=calibration(plan), verify=False, **options)
    return load_file(out / "model.safetensors")


def fused(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """The modules that servers hold as one matrix, by the names that they look for."""
    matrices: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for module in (name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")):
        block, _, leaf = module.rpartition(".")
        for names in FUSED:
            if leaf in names:
                matrices[block, names].append(module)
    return [modules for modules in matrices.values() if len(modules) > 1]


def changed(tensors: dict[str, torch.Tensor], modules: list[str]) -> int:
    """How many codes are others after the formula of vLLM's `requantize_with_max_scale`, in float32."""
    scales = [tensors[f"{module}.weight_scale"].reshape(()) for module in modules]
    largest = torch.stack(scales).max()
    count = 0
    for module, scale in zip(modules, scales, strict=True):
        codes = tensors[f"{module}.weight"]
        again = (codes.float() * scale / largest).clamp(-448, 448).to(E4M3)
        count += int((again.view(torch.uint8) != codes.view(torch.uint8)).sum())
    return count


@grid({"family": list(FAMILIES), "format_": ["modelopt", "compressed-tensors"]})
def test_no_code_changes_when_a_server_fuses(tmp_path: Path, family: str, format_: str) -> None:
    tensors = converted(family, tmp_path / "out", format=format_)
    matrices = fused(tensors)
    assert matrices
    assert [modules for modules in matrices if changed(tensors, modules)] == []


@pytest.mark.parametrize("format_", ["modelopt", "compressed-tensors"])
def test_own_scales_are_those_of_modelopt_and_servers_quantize_again(tmp_path: Path, format_: str) -> None:
    shared = converted("llama", tmp_path / "shared", format=format_)
    own = converted("llama", tmp_path / "own", format=format_, own_scales=True)
    for modules in fused(own):
        assert changed(own, modules) > 0
        scales = [own[f"{module}.weight_scale"] for module in modules]
        assert all(torch.equal(shared[f"{module}.weight_scale"], max(scales)) for module in modules)
    alone = [name for name in own if name.endswith((".o_proj.weight", ".down_proj.weight", ".input_scale"))]
    assert alone and all(torch.equal(own[name].float(), shared[name].float()) for name in alone)


def test_the_plan_and_the_report_name_the_groups(tmp_path: Path) -> None:
    plan = bridge.plan(oracle.source("llama", "bf16"), "hf", "fp8")
    groups = {step.shares for step in plan.quantized} - {""}
    assert groups == {
        f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("self_attn.q_proj", "mlp.gate_proj")
    }
    told = next(o.expression for o in plan.outputs if o.spec.name.endswith("0.self_attn.k_proj.weight_scale"))
    assert told == "amax(model.layers.0.self_attn.k_proj.weight, tensor), the largest of 3 / 448"
    report = bridge.convert(oracle.source("llama", "bf16"), "hf", "fp8", tmp_path / "out", calib=calibration(plan))
    assert report.passed
    assert [note for note in report.notes if note.startswith("in 4 groups weights share one scale")]
