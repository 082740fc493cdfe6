"""Cut a transformers model without weights to the layers that differ.

Buffers outside the state dict must be real: `inv_freq`, `embed_scale` and the like are in no checkpoint and go into the
graph as data. Buffers inside it (batch-norm statistics, a router's correction bias) are weights like the parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

# Attributes with the index of a layer; the other attributes of a layer decide its kind.
_INDEX = ("layer_idx", "layer_index", "layer_id", "layer_number", "layer_num")
_COUNTS = ("num_layers", "num_hidden_layers", "n_layers", "n_layer")
_LISTS = ("cross_attention_layers",)  # of indices of layers


@dataclass(frozen=True)
class Layers:
    """The repeated blocks of a model: path of their ModuleList, and kind of each; equal blocks have one kind."""

    path: str
    kinds: tuple[Hashable, ...]

    def representatives(self) -> list[int]:
        """Two layers of each kind, to be compared with each other, or one if a kind occurs once."""
        count: dict[Hashable, int] = {}
        picked = []
        for i, kind in enumerate(self.kinds):
            count[kind] = count.get(kind, 0) + 1
            if count[kind] <= 2:
                picked.append(i)
        return picked


def find_layers(model: Any, config: Any, inside: Any = None) -> Layers | None:
    """Find the one ModuleList with as many blocks as the config has layers; None if there is not exactly one.

    inside: the module to look in; its config is `config`.
    """
    from torch import nn

    count = getattr(config, "num_hidden_layers", None)
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if inside is not None:
        within = {id(module) for module in inside.modules()}
        lists = [(n, m) for n, m in lists if id(m) in within]
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
    """Keep only the blocks `keep` of `model` and its config, with indices and per-layer lists to match."""
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
    parents = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    for owner in (config, *parents):
        for key in _LISTS:
            if isinstance(listed := vars(owner).get(key), list):
                setattr(owner, key, [new for new, old in enumerate(keep) if old in listed])
    for parent in parents:
        for key in _COUNTS:
            if isinstance(parent.__dict__.get(key), int) and parent.__dict__[key] == count:
                setattr(parent, key, len(keep))


def _per_layer(config: Any) -> Iterator[tuple[str, Any]]:
    count = config.num_hidden_layers
    for key, value in sorted(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == count and key != "architectures":
            yield key, value


def _signature(block: Any, index: int) -> Hashable:
    """The kind of a block, without its index: classes, plain attributes, parameter shapes, buffer bytes."""
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

    if buffer.is_meta:  # made of a weight, as I-BERT makes them
        return str(buffer.dtype), tuple(buffer.shape), b""
    return str(buffer.dtype), tuple(buffer.shape), buffer.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _attributes(module: Any, index: int) -> Iterator[tuple[str, str]]:
    for key, value in sorted(vars(module).items()):
        if key in _INDEX and isinstance(value, int):
            yield key, repr(value - index)
        elif isinstance(value, int | float | str | tuple | list | None):
            yield key, repr(value)
        elif callable(value) and hasattr(value, "__qualname__"):
            yield key, value.__qualname__
