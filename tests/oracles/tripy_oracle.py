"""What ModelOpt's fake-quantized model holds, as target `tripy` writes it, and what a runtime makes of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import bridge
from bridge.sources.live_models.checkpoint_names import LiveSlice, live_names
from tests.oracles.modelopt_oracle import Answer

COMPANIONS = ("weight_scale", "input_scale", "pre_quant_scale")
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RANGES = {"int8": (-128, 127), "int4": (-8, 7)}


@dataclass
class Held:
    """A quantized matrix: codes [out, in] as numbers, and its scales as float32, the weight's one a value."""

    codes: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None
    pre_quant_scale: torch.Tensor | None


def others(mine: Held, other: Held) -> int:
    """How many codes of `mine` are not `other`'s."""
    return int((mine.codes != other.codes).sum())


def convert(source: Any, quant: Any, out: Path, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Convert, proved, and read what was written."""
    report = bridge.convert(source, "tripy", quant, out, **options)
    assert report.passed and not report.findings
    return read(out)


def read(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a written directory, and the section `tripy` of its config."""
    return load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())["tripy"]


def plain(tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Without what quantization adds, every matrix [out, in]."""
    kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in COMPANIONS}
    turned = {f"{name}.weight" for name, entry in section["modules"].items() if entry["layout"] == "in_out"}
    return {name: tensor.T if name in turned else tensor for name, tensor in kept.items()}


def rounded(quotient: torch.Tensor, dtype: str) -> torch.Tensor:
    """Tripy's quantize after its division: codes as numbers."""
    if dtype == "float8":
        return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return quotient.round().clamp(*RANGES[dtype])


def ours(tensors: dict[str, torch.Tensor], module: str, entry: dict[str, Any]) -> Held:
    """A module of a written file as Tripy reads it: its weight coded anew by a true division."""
    weight, scale = (tensors[f"{module}.{part}"].float() for part in ("weight", "weight_scale"))
    if entry["weight_quant_dim"] == 0:
        scale = scale[:, None]
    if entry["block"]:
        scale = scale.repeat_interleave(entry["block"], 0)
    codes, scale = rounded(weight / scale, entry["quant_dtype"]), scale.expand(weight.shape)
    if entry["layout"] == "in_out":
        codes, scale = codes.T, scale.T
    beside = (tensors.get(f"{module}.{part}") for part in COMPANIONS[1:])
    return Held(codes, scale, *(None if tensor is None else tensor.float() for tensor in beside))


def theirs(answer: Answer, model: Any, tensor: str) -> Held:
    """The matrix of a checkpoint in ModelOpt's model, read off its quantizers.  model: the one it was made of."""
    ref = live_names(model)[tensor].ref
    assert ref is not None
    weight, quantizer, entering = _found(answer.model, ref)
    with torch.no_grad():
        values = quantizer(weight).float()  # rounded to the model's dtype, which no code is lost to
    bound = torch.tensor(float(quantizer.maxbound))
    scale, (out, in_) = quantizer._amax.float() / bound, weight.shape
    if scale.numel() > out:
        scale = scale.reshape(out, -1).repeat_interleave(out * in_ // scale.numel(), 1)
    scale = scale.expand(weight.shape)
    dtype = {8: "int8", 4: "int4"}.get(quantizer.num_bits, "float8")
    rows = slice(*(ref.rows or (None, None)))
    amax = getattr(entering, "_amax", None) if entering.is_enabled else None
    smooth = getattr(entering, "_pre_quant_scale", None)
    return Held(
        rounded(values / scale, dtype)[rows],
        scale[rows],
        None if amax is None else amax.float().reshape(()) / torch.tensor(float(entering.maxbound)),
        None if smooth is None else smooth.float().reshape(-1),
    )


def _found(model: Any, ref: LiveSlice) -> tuple[torch.Tensor, Any, Any]:
    """A live matrix [out, in], its quantizer and that of its input; stacked experts have their own words for these."""
    owner, _, leaf = ref.live.rpartition(".")
    module = model.get_submodule(owner)
    if ref.expert is None:
        return module.weight, module.weight_quantizer, module.input_quantizer
    quantizer = getattr(module, f"{leaf}_weight_quantizers")[ref.expert]
    return getattr(module, leaf)[ref.expert], quantizer, getattr(module, f"{leaf}_input_quantizer")
