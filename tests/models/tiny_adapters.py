"""LoRA adapters over tiny-llama, written without peft: random factors for some of its layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bridge.sources.opening import open_source

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": str(MODEL),
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
}


def factors(rank: int = 4, modules: tuple[str, ...] = ("q_proj", "down_proj"), scale: float = 0.02) -> dict[str, Any]:
    """A and B of every layer whose name ends with one of `modules`."""
    random = np.random.default_rng(0)
    state = {}
    for name, spec in open_source(MODEL).specs.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            a, b = random.standard_normal((rank, spec.shape[1])), random.standard_normal((spec.shape[0], rank))
            state[f"base_model.model.{module}.lora_A.weight"] = (a * scale).astype(np.float32)
            state[f"base_model.model.{module}.lora_B.weight"] = (b * scale).astype(np.float32)
    return state


def write_adapter(out: Path, config: Mapping[str, Any] | None = None, state: Mapping[str, Any] | None = None) -> Path:
    """Write a directory as peft does. `config`: entries in place of those of CONFIG."""
    out.mkdir(parents=True)
    (out / "adapter_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    save_file(dict(factors() if state is None else state), out / "adapter_model.safetensors")
    return out
