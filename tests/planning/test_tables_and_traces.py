"""Conversions by a table write the bytes that conversions by a trace write: codes, scales, names of what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from bridge.planning import structure
from bridge.quant.schemes.load import load_scheme
from tests.models.decoder_families import build

_HYBRID = {
    "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "hidden_size": 128, "head_dim": 64,
    "intermediate_size": 384, "n_routed_experts": 5, "moe_intermediate_size": 256, "mamba_head_dim": 32,
    "moe_shared_expert_intermediate_size": 640, "ssm_state_size": 40,
}  # fmt: skip
_WIDTHS = {
    "hidden_size": 128, "head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 3, "num_hidden_layers": 4,
    "intermediate_size": 384, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
    "moe_intermediate_size": 640, "hidden_size_per_layer_input": 256, "attention_k_eq_v": True,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("NemotronHForCausalLM", _HYBRID),
    "nemotron_h-latent": ("NemotronHForCausalLM", _HYBRID | {"moe_latent_size": 512}),
    "gemma4": ("Gemma4ForCausalLM", _WIDTHS),
    "gemma4-dense": ("Gemma4ForCausalLM", _WIDTHS | {"enable_moe_block": False, "attention_k_eq_v": False}),
}
IDS = [torch.arange(1, 49).reshape(2, 24)]
NAMED = ("bridge.json", "report.json", "report.html", "README.md", "bridge/calibration.safetensors")  # times, paths


def written(root: Path) -> dict[str, bytes]:
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in NAMED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quant", "form"),
    [
        ("fp8", "modelopt"),
        ("int4_awq", "modelopt"),
        ("nvfp4", "compressed-tensors"),
        *(
            pytest.param(quant, form, marks=pytest.mark.product)
            for quant in ("int8_sq", "fp8_pc_pt", "fp8_block", "w4a8_awq", "nvfp4_awq", "int8_wo")
            for form in ("modelopt", "compressed-tensors")
            if (quant, form) not in {(awq, "compressed-tensors") for awq in ("int8_sq", "w4a8_awq", "nvfp4_awq")}
        ),
    ],
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.product] * ("-" in name)) for name in MODELS])
def test_a_table_quantizes_what_a_trace_does(
    name: str, quant: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pre-scales have a place, a table says more: compressed-tensors has none for those of a trace."""
    architecture, fields = MODELS[name]
    build(architecture, **fields).save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"format": form, "progress": False, "verify": False}
    if load_scheme(quant).needs_calibration:
        options["calib"] = IDS
    bridge.convert(tmp_path / "model", "hf", quant, tmp_path / "table", **options)
    monkeypatch.setattr(structure, "structure_by_table", lambda config, specs: None)
    plan = bridge.plan(tmp_path / "model", "hf", quant, **{k: v for k, v in options.items() if k == "format"})
    bridge.convert(tmp_path / "model", "hf", quant, tmp_path / "trace", **options)
    assert plan.traced
    assert written(tmp_path / "table") == written(tmp_path / "trace")
