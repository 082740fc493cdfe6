"""What one of several processes does for tests.workflows.live.test_megatron: hand over its part of a GPTModel."""

from __future__ import annotations

from typing import Any

import torch

import bridge
from tests.models.megatron_families import EVERY, VOCAB
from tests.oracles import megatron_process
from tests.workflows.load import load_process

CONFIG = {"vocab_size": VOCAB}  # the model has padded rows besides


def opened(name: str, directory: str, scheme: str | None, **options: Any) -> tuple[Any, Any]:
    """This rank's part of a model, filled by Megatron's own load, and its tensors."""
    model = megatron_process.build(EVERY[name])
    megatron_process.load(model, directory)
    return model, bridge.tensors([model], "vllm", scheme, config=CONFIG, **options)


def digests(name: str, directory: str, schemes: list[str | None]) -> list[Any]:
    """Of each scheme the digest, and tensors that are not twice themselves after all parameters were doubled."""
    found: list[Any] = []
    for scheme in schemes:
        model, source = opened(name, directory, scheme)
        found.append(source.digest())
        if scheme is None:
            before = dict(source)
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    tensor.mul_(2)
            found += [key for key, tensor in source if not torch.equal(tensor, before[key] * 2)]
            assert bool(source.received) == (torch.distributed.get_world_size() > 1)
            assert [meta.name for meta in source.metadata] == [*before]
    return found


def virtual(source: Any, directory: str, schemes: list[str | None]) -> list[str]:
    """The digest of each scheme, of a model in chunks of a virtual pipeline that `load` filled."""
    chunks = load_process._chunks(directory)
    bridge.load(chunks, source)
    config = {"vocab_size": source.config["vocab_size"]}
    return [bridge.tensors(chunks, "vllm", scheme, config=config).digest() for scheme in schemes]


def failing(name: str, directory: str, kind: str) -> str:
    """The error that this rank raises when rank 1 does something else."""
    other = torch.distributed.get_rank() == 1
    model = megatron_process.build(EVERY[name])
    megatron_process.load(model, directory)
    layer = model.decoder.layers[1].mlp.linear_fc2
    try:
        if kind == "missing" and other:
            layer.weight = None
        scheme = "int8_wo" if kind == "plan" and other else "fp8_pc_pt"
        memory = 1000 if kind == "refused" and other else None
        source = bridge.tensors(model, "vllm", scheme, config=CONFIG, memory=memory, timeout=20.0)
        if kind == "reshaped" and other:
            layer.weight = torch.nn.Parameter(layer.weight[:, :4].detach())
        if kind == "nan" and other:
            layer.weight.detach()[3, 5] = float("nan")
        source.digest()
    except bridge.BridgeError as error:
        return f"{type(error).__name__}: {error}"
    return ""
