"""How far the outputs of an exported int4 checkpoint are from the float model's, decoded without `bridge`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.oracles import export_oracle as oracle


def names(checkpoint: Path) -> set[str]:
    """The tensors of a checkpoint."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        return set(file.keys())


def quantized(checkpoint: Path) -> set[str]:
    """The matrices of a checkpoint that have scales."""
    return {name.removesuffix(".weight_scale") for name in names(checkpoint) if name.endswith(".weight_scale")}


def output_error(source: Path, checkpoint: Path, batch: dict[str, torch.Tensor], work: Path) -> float:
    """The relative L2 error of the first output, both models in float32."""
    return distance(_plain(source, checkpoint, work / "decoded"), source, batch, work)


def distance(model: Any, source: Path, batch: dict[str, torch.Tensor], work: Path) -> float:
    """The same of a model in float32."""
    got, wanted = _first(model, batch), _first(_plain(source, source, work / "float"), batch)
    return float((got - wanted).norm() / wanted.norm())


def _plain(source: Path, checkpoint: Path, out: Path) -> Any:
    """The model of a checkpoint in float32, quantized matrices decoded: `source` has their shapes."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stored = load_file(checkpoint / "model.safetensors")
    tensors = {}
    for name, shape in ((name, tensor.shape) for name, tensor in load_file(source / "model.safetensors").items()):
        if name in stored:
            plain = decode(stored, name.removesuffix(".weight")) if stored[name].dtype == torch.uint8 else stored[name]
            tensors[name] = (plain if plain.shape == shape else plain.T).float().contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return oracle.load(out).float()


def decode(stored: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """The weight [out, in] that a matrix multiplies its input with: rows 2r in the low bits of a byte, 2r + 1 above."""
    pairs, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"].float()
    codes = torch.stack([pairs & 15, pairs >> 4], 1).flatten(0, 1).to(torch.int8)  # out, in
    codes = torch.where(codes > 7, codes - 16, codes).float()
    weight = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return weight * stored.get(f"{module}.pre_quant_scale", torch.ones(1)).float()


def _first(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    given = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    with torch.no_grad():
        answer = model(**given)
    return (answer if isinstance(answer, torch.Tensor) else answer[0]).float()
