"""A transformers model with fake parameters and real buffers, cut to the layers that differ; never allocates a weight.

Buffers outside the state dict must be real: `inv_freq`, `embed_scale` and the like are in no checkpoint and go into the
graph as data. Those inside it (batch-norm statistics, a router's correction bias) are weights like the parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bridge.errors import ExportError

# Integers that say where a layer stands; the rest of a layer's attributes say what it is.
_INDEX = ("layer_idx", "layer_index", "layer_id", "layer_number", "layer_num")
_COUNTS = ("num_layers", "num_hidden_layers", "n_layers", "n_layer")


@dataclass(frozen=True)
class Layers:
    """The repeated blocks of a model: `path` of their ModuleList, and the kind of each, equal where they are alike."""

    path: str
    kinds: tuple[Hashable, ...]

    def chosen(self) -> list[int]:
        """Two layers of each kind (one proves the other), one where a kind occurs once."""
        count: dict[Hashable, int] = {}
        picked = []
        for i, kind in enumerate(self.kinds):
            count[kind] = count.get(kind, 0) + 1
            if count[kind] <= 2:
                picked.append(i)
        return picked


def build_meta(config: Any, cls: Any, dtype: Any) -> Any:
    """Build `cls(config)` with parameters on the meta device and buffers computed on the CPU."""
    import torch
    from torch import nn
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def to_meta(_module: Any, _name: str, parameter: Any) -> Any:
        if parameter is None or parameter.device.type == "meta":
            return None  # keeps the identity of tied parameters
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    config._attn_implementation = None  # a live model's choice (flash attention) cannot be exported
    config.dtype = dtype
    before = torch.get_default_dtype()
    hook = register_module_parameter_registration_hook(to_meta)
    try:
        torch.set_default_dtype(dtype)
        return cls(config).eval()
    finally:
        torch.set_default_dtype(before)
        hook.remove()


def settle_rope(model: Any) -> None:
    """Let long RoPE choose its frequencies inside the graph; transformers writes the choice into a buffer instead."""
    import inspect
    import types

    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def forward(self: Any, x: Any, position_ids: Any) -> Any:
        trained = self.config.rope_parameters["original_max_position_embeddings"]
        is_long = torch.max(position_ids) + 1 > trained
        chosen = torch.where(is_long, self.long_inv_freq, self.original_inv_freq)
        settled = types.SimpleNamespace(inv_freq=chosen, attention_scaling=self.attention_scaling)
        return inspect.unwrap(type(self).forward)(settled, x, position_ids)

    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if kind == "dynamic":
            raise ExportError(
                f"{name}: RoPE of type `dynamic` computes its frequencies anew for each length, which no fixed graph "
                "does\n  hint   set rope_parameters to `yarn`, `linear` or `longrope`, or convert with target `hf`"
            )
        if kind == "longrope":
            length = module.config.rope_parameters["original_max_position_embeddings"] + 1
            long_freq, _ = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=length)
            module.register_buffer("long_inv_freq", long_freq, persistent=False)
            module.forward = types.MethodType(forward, module)


def make_fake(model: Any, mode: Any) -> None:
    """Replace each weight by a fake CPU tensor of `mode`, one for each: what was tied stays tied."""
    import torch
    from torch import nn

    made: dict[int, tuple[Any, Any]] = {}  # the original is kept alive: its id is the key
    with mode:
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = (nn.Parameter(fake, requires_grad=False), parameter)
                module._parameters[key] = made[id(parameter)][0]
            for key, buffer in module._buffers.items():
                stored = key not in module._non_persistent_buffers_set
                if buffer is not None and (buffer.is_meta or (stored and buffer.is_floating_point())):
                    module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)


def find_layers(model: Any, config: Any) -> Layers | None:
    """Find the one ModuleList that holds as many blocks as the config counts layers; None where that is not clear."""
    from torch import nn

    count = getattr(config, "num_hidden_layers", None)
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    lists = [(n, m) for n, m in lists if not any(n.startswith(other + ".") for other, _ in lists)]
    if len(lists) != 1:
        return None
    path, blocks = lists[0]
    inside = [id(p) for block in blocks for p in block.parameters()]
    if len(inside) != len(set(inside)):
        return None
    entries = [v for _, v in _per_layer(config)]
    kinds = tuple((_signature(block, i), tuple(repr(e[i]) for e in entries)) for i, block in enumerate(blocks))
    return Layers(path, kinds)


def cut_layers(model: Any, config: Any, layers: Layers, keep: list[int]) -> None:
    """Keep only the blocks `keep` of `model`, as if its config had said so; indices and per-layer lists follow."""
    blocks = model.get_submodule(layers.path)
    kept = [blocks[i] for i in keep]
    count = len(blocks)
    blocks._modules.clear()
    for new, (old, block) in enumerate(zip(keep, kept, strict=True)):
        blocks._modules[str(new)] = block
        for module in block.modules():
            for key in _INDEX:
                if isinstance(getattr(module, key, None), int):
                    setattr(module, key, getattr(module, key) - old + new)
    for key, entries in list(_per_layer(config)):
        setattr(config, key, [entries[i] for i in keep])
    config.num_hidden_layers = len(keep)
    parts = layers.path.split(".")
    for depth in range(len(parts)):
        parent = model.get_submodule(".".join(parts[:depth]))
        for key in _COUNTS:
            if isinstance(parent.__dict__.get(key), int) and parent.__dict__[key] == count:
                setattr(parent, key, len(keep))


def _per_layer(config: Any) -> Iterator[tuple[str, Any]]:
    count = config.num_hidden_layers
    for key, value in sorted(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == count and key != "architectures":
            yield key, value


def _signature(block: Any, index: int) -> Hashable:
    """What a block is, apart from its place: classes, plain attributes, parameter shapes, buffer bytes."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(_attributes(module, index)),
            tuple((k, tuple(p.shape), str(p.dtype)) for k, p in module._parameters.items() if p is not None),
            tuple((k, _bytes(b)) for k, b in module._buffers.items() if b is not None),
        )
        for name, module in block.named_modules()
    )


def _bytes(buffer: Any) -> tuple[str, tuple[int, ...], bytes]:
    import torch

    return str(buffer.dtype), tuple(buffer.shape), buffer.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _attributes(module: Any, index: int) -> Iterator[tuple[str, str]]:
    for key, value in sorted(vars(module).items()):
        if key in _INDEX and isinstance(value, int):
            yield key, repr(value - index)
        elif isinstance(value, int | float | str | tuple | list | None):
            yield key, repr(value)
        elif callable(value) and hasattr(value, "__qualname__"):
            yield key, value.__qualname__


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's log lines (torchvision is absent, no data to deduplicate) while it runs."""
    import logging
    import warnings

    loggers = [logging.getLogger(n) for n in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
