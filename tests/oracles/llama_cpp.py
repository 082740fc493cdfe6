"""llama.cpp, compiled for the CPU in the wheel `xllamacpp`, as an oracle of GGUF files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode

from bridge.core.dtypes import K_QUANTS
from bridge.planning.plan import Plan, Step
from bridge.tables.expressions.regions import reordered
from bridge.targets.gguf.runtime import LlamaCpp
from bridge.targets.manifest import load_manifest


def log_probabilities(path: Path, prompts: Sequence[list[int]], vocab: int) -> list[np.ndarray]:
    """What llama.cpp says of the token after each prompt."""
    engine = LlamaCpp(path)
    return [engine.log_probabilities(prompt, vocab) for prompt in prompts]


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The float32 values of every tensor, by gguf-py; a second scale of NVFP4 is multiplied in."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    values = {name: gguf.quants.dequantize(t.data, t.tensor_type) for name, t in stored.items()}
    for name in [name for name in values if name.endswith(".scale")]:
        values[name.removesuffix(".scale") + ".weight"] *= values[name]
    return values


def dequantized(directory: Path, source: Path, plan: Plan) -> Any:
    """The transformers model with the values of the written file instead of its weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    stored = _source_tensors(source)
    written = tensors(directory / "model.gguf")
    for step in plan.steps:
        _undo(step, written[step.outputs[0].spec.name], stored)
    save = source.parent / f"{source.name}-dequantized"
    from safetensors.torch import save_file

    model.config.save_pretrained(save)
    save_file({name: torch.from_numpy(array) for name, array in stored.items()}, save / "model.safetensors")
    return transformers.AutoModelForCausalLM.from_pretrained(
        save,
        dtype=torch.float32,
        experts_implementation="eager",  # a call of linear each, see RoundedInputs
    ).eval()


def _source_tensors(source: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    return {name: t.float().numpy().copy() for name, t in load_file(source / "model.safetensors").items()}


def _undo(step: Step, values: np.ndarray, stored: Mapping[str, np.ndarray]) -> None:
    """Put the values of one written tensor back to where the source has them."""
    values = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(-1, 1)
    at = 0
    for part in step.inputs:
        target = stored[part.source]
        target = target[part.expert] if part.expert is not None else target
        whole = target.reshape(len(target), -1)
        view = whole[slice(*(part.rows or (None,))), slice(*(part.cols or (None,)))]
        rows = view.shape[1] if part.transposed else view.shape[0]
        piece = values[at : at + rows] - step.shift
        piece = reordered(np.ascontiguousarray(piece), -part.rope) if part.rope else piece
        view[:] = piece.T if part.transposed else piece
        at += rows
    assert at == len(values), step.outputs[0].spec.name


def divergence(source: Path, out: Path, work: Path) -> float:
    """The largest KL of llama.cpp's last position from the written weights with rounded inputs, over three prompts.

    `work`: a directory for a link to the source, whose weights `dequantized` replaces.
    """
    link = work / source.name
    link.symlink_to(source)
    plan = load_manifest(out).plan
    model = dequantized(out, link, plan)
    vocab = model.config.vocab_size
    prompts = [np.random.default_rng(0).integers(3, vocab, length).tolist() for length in (3, 17, 60)]
    divergences = []
    for prompt, ours in zip(prompts, log_probabilities(out / "model.gguf", prompts, vocab), strict=True):
        with torch.no_grad(), RoundedInputs(model, plan):
            theirs = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
        divergences.append(float((np.exp(theirs) * (theirs - ours)).sum()))
    return max(divergences)


class RoundedInputs(TorchFunctionMode):
    """Rounds what quantized matrices of a model multiply, as llama.cpp does: to 8 bits in blocks.

    Of 256 values for K-quants, of 32 for others.
    """

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
        super().__init__()
        kinds = {part.source: step.outputs[0].spec.dtype for step in plan.quantized for part in step.inputs}
        quantized = {*kinds}
        experts = any(".experts." in name for name in quantized)  # one parameter of a model, however they are stored
        alike = {kind in K_QUANTS for kind in kinds.values()}
        assert len(alike) == 1 or not experts, "K-quants beside others"
        first = next(iter(kinds.values()))
        self._rounding = {
            parameter.untyped_storage().data_ptr(): _rounded_by_256 if kinds.get(name, first) in K_QUANTS else _rounded
            for name, parameter in model.named_parameters()
            if name in quantized or (experts and ".experts." in name)
        }
        assert self._rounding

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = {torch.nn.functional.linear: 0, torch.addmm: 1}.get(func)  # transformers' Conv1D calls addmm
        rounding = None if at is None else self._rounding.get(args[at + 1].untyped_storage().data_ptr())
        if rounding:
            args = (*args[:at], rounding(args[at]), *args[at + 1 :])
        return func(*args, **(kwargs or {}))


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Q8_0 and back, by gguf-py."""
    rows = values.detach().reshape(-1, values.shape[-1]).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    back = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    return torch.from_numpy(back).reshape(values.shape)


def _rounded_by_256(values: torch.Tensor) -> torch.Tensor:
    """Q8_K and back, which gguf-py has not: the value of the largest magnitude becomes -127 (ggml-quants.c)."""
    blocks = values.detach().float().reshape(-1, 256)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    inverse = torch.where(largest == 0, 0, -127.0 / largest)
    codes = torch.round(blocks * inverse).clamp(max=127)
    return torch.where(inverse == 0, 0, codes * (1 / inverse)).reshape(values.shape)
