"""Checkpoints with faults, and what changes one.

They begin with what their tool wrote: ModelOpt, compressed-tensors, transformers, torch. AutoAWQ, GPTQModel and
DeepSeek's release do not run here: their files are written as documented (`tests.models.served_checkpoints`,
`tests.models.stored_checkpoints`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bridge.cli.check import check_path
from tests import once
from tests.models import stored_checkpoints
from tests.oracles import compressed_oracle as compressed
from tests.oracles import export_oracle as oracle

SMALL = "model.layers.1.self_attn.k_proj.weight"
Change = Callable[[dict[str, Any]], None]


def plain(root: Path) -> None:
    """A tiny Llama of transformers, in shards."""
    model = stored_checkpoints.llama()
    with oracle._quiet():
        model.save_pretrained(root, max_shard_size="500KB")


def made(name: str, make: Callable[[Path], object], tmp_path: Path) -> Path:
    """A copy of a checkpoint that is made once a run."""
    return Path(shutil.copytree(once.directory(f"doctor-{name}", make), tmp_path / name))


def edited(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n")


def edited_config(directory: Path, **entries: Any) -> None:
    edited(directory / "config.json", lambda config: config.update(entries))


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def retensored(directory: Path, change: Change) -> None:
    """Change the tensors of a single file."""
    held = load_file(directory / "model.safetensors")
    change(held)
    save_file(held, directory / "model.safetensors", {"format": "pt"})


def rules(directory: Path) -> list[str]:
    return [str(problem.finding["rule"]) for problem in check_path(directory) if problem.finding]


def stale_index(directory: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        placed = index["weight_map"]
        placed["model.layers.7.mlp.up_proj.weight"] = placed["model.norm.weight"]
        del placed["model.layers.1.self_attn.k_proj.weight"]
        index["metadata"]["total_size"] += 8

    edited(directory / "model.safetensors.index.json", change)


def promises_drafts(directory: Path) -> None:
    edited_config(directory, num_nextn_predict_layers=1)


def leftover(directory: Path) -> None:
    section = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": []}
    edited_config(directory, quantization_config=section)


def wrapped(directory: Path) -> None:
    """As a trainer saves a compiled model under DDP: the names are those of torch's own wrapper."""
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype="auto")
    own = {name: f"module.{name}" for name in torch.compile(model).state_dict()}
    for file in directory.glob("*.safetensors"):
        held = {own[f"_orig_mod.{name}"]: tensor for name, tensor in load_file(file).items()}
        save_file(held, file, {"format": "pt"})

    def change(index: dict[str, Any]) -> None:
        index["weight_map"] = {own[f"_orig_mod.{name}"]: file for name, file in index["weight_map"].items()}

    edited(directory / "model.safetensors.index.json", change)


def own_scales(root: Path) -> None:
    """NVFP4 as compressed-tensors packs it, each matrix with its own scale above the blocks."""
    model = stored_checkpoints.llama(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("up_proj.weight", "k_proj.weight")):
                weight *= 0.37
            if name == SMALL:
                weight[:48] *= 3e-5  # scales of blocks that are subnormal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed, "FUSED", ())
        compressed.compress(model, "NVFP4", root)


def one_scale(root: Path) -> None:
    """NVFP4 as llm-compressor writes it: fused matrices share the scale above their blocks; those of `up` are small."""
    model = stored_checkpoints.llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight *= 0.3
    compressed.compress(model, "NVFP4", root)


def experts(root: Path) -> None:
    """FP8 of ModelOpt, experts of Qwen 3 MoE."""
    stored_checkpoints.exported(stored_checkpoints.modelopt(stored_checkpoints.mixture(), "fp8"), root)
