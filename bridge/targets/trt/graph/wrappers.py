"""The calling convention of an exported graph.

Names, example inputs and dynamic axes. Every layer has a growing cache, even if transformers would cut it at a sliding
window: the mask does the sliding, so inputs and outputs have the same form in all layers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers.cache_utils import DynamicCache, DynamicLayer

from bridge.core.errors import ExportError
from bridge.targets.trt.graph.tasks import Task

# Pairwise different, and neither 0 nor 1, for which torch would specialize.
BATCH, SEQUENCE, PAST = 2, 3, 5
Axes = tuple[str | int, ...]  # a word is dynamic, a number static


@dataclass(frozen=True)
class Call:
    """The arguments of `torch.export`, and readable names of inputs and outputs."""

    module: nn.Module
    args: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    inputs: dict[str, Axes]
    outputs: dict[str, Axes]
    taps: tuple[str, ...] = ()  # outputs that only mark K and V inside the graph


class _Tap(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """A cache layer that only keeps the inputs of attention, for graphs without a cache."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0


class _Flat(nn.Module):
    """A model that takes named tensors and a flat list of past keys and values and returns a flat tuple."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...], layer: type | None = None, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs
        self.layer = layer
        self.options = options

    def forward(self, inputs: dict[str, Any], past: list[Any]) -> tuple[Any, ...]:
        if self.layer is None:
            out = self.model(**inputs, **self.options, return_dict=True)
            return tuple(out[name] for name in self.outputs)
        cache = DynamicCache()
        cache.layers, cache.layer_class_to_replicate = [], self.layer
        # `DynamicCache([(k, v), ...])` would concatenate each past with an empty constant first.
        for k, v in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = k, v, True
            layer.dtype, layer.device = k.dtype, k.device
            cache.layers.append(layer)
        out = self.model(**inputs, past_key_values=cache, use_cache=True, return_dict=True)
        present = (t for layer in out.past_key_values.layers for t in (layer.keys, layer.values))
        return (*(out[name] for name in self.outputs), *present)


def text_call(model: Any, task: Task, mode: Any, dtype: torch.dtype, *, cache: bool) -> Call:
    """Return the call of a text model: an encoder, or a decoder with or without a cache."""
    accepted = inspect.signature(model.forward).parameters
    names = [n for n in task.inputs if n in accepted and n != "pixel_values"]
    if "token_type_ids" in names and not getattr(model.config, "type_vocab_size", 0):
        names.remove("token_type_ids")
    past = PAST if task.cached and cache else 0
    with mode:
        inputs = {n: _example(n, past) for n in names}
        probe, shapes = _probe(model, inputs, task, cache)
        pasts = [torch.zeros(BATCH, s[1], PAST, s[3], dtype=dtype) for s in shapes] if past else []
    # Encoders slice a table of positions, for which torch needs a declared bound.
    bound = None if task.cached else getattr(model.config, "max_position_embeddings", None)
    # torch does not trace eager attention's mask for one token as well; the resulting graph holds for one.
    least = 2 if task.cached and model.config._attn_implementation == "eager" else None
    batch, sequence, cached = Dim("batch"), Dim("sequence", min=least, max=bound), Dim("past")
    # A Dim cannot express past + sequence: the mask's axis is left to torch.
    axes = {n: {0: batch, 1: Dim.DYNAMIC if past and n == "attention_mask" else sequence} for n in names}
    total = "total_sequence" if past else "sequence"
    feeds: dict[str, Axes] = {n: ("batch", total if n == "attention_mask" else "sequence") for n in names}
    gives: dict[str, Axes] = {n: _axes(n, probe[n].shape) for n in probe}
    slots = [f"{i}.{kind}" for i in range(len(shapes) // 2) for kind in ("key", "value")]
    for slot, s in zip(slots, shapes, strict=True):
        if past:
            feeds[f"past_key_values.{slot}"] = ("batch", s[1], "past_sequence", s[3])
        gives[f"present.{slot}"] = ("batch", s[1], total, s[3])
    layer = (DynamicLayer if past else _Tap) if shapes else None
    return Call(
        _Flat(model, tuple(probe), layer, **({"use_cache": False} if task.cached else {})),
        (inputs, pasts),
        (axes, [{0: batch, 2: cached}] * len(pasts)),
        feeds,
        gives,
        () if past else tuple(f"present.{slot}" for slot in slots),
    )


def image_call(model: Any, task: Task, mode: Any, dtype: torch.dtype) -> Call:
    """Return the call of an image model: `pixel_values` of the config's size, dynamic batch."""
    config = model.config
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    channels = int(getattr(config, "num_channels", 3))
    with mode:
        inputs = {"pixel_values": torch.zeros(BATCH, channels, height, width, dtype=dtype)}
        out = model(**inputs, return_dict=True)
        probe = {n: out[n] for n in task.outputs if out.get(n) is not None}
    gives: dict[str, Axes] = {n: ("batch", *map(int, t.shape[1:])) for n, t in probe.items()}
    feeds: dict[str, Axes] = {"pixel_values": ("batch", channels, height, width)}
    return Call(_Flat(model, tuple(probe)), (inputs, []), ({"pixel_values": {0: Dim("batch")}}, []), feeds, gives)


def _example(name: str, past: int) -> torch.Tensor:
    if name == "attention_mask":
        return torch.ones(BATCH, past + SEQUENCE, dtype=torch.long)
    if name == "position_ids":
        return torch.arange(past, past + SEQUENCE).expand(BATCH, SEQUENCE).contiguous()
    return torch.zeros(BATCH, SEQUENCE, dtype=torch.long)


def _probe(model: Any, inputs: dict[str, Any], task: Task, cache: bool) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Run the model once on fake tensors; return its outputs, and the shapes of its keys and values."""
    short = {n: t[:, -SEQUENCE:] for n, t in inputs.items()}
    layers = None
    if task.cached:
        try:
            out = model(**short, past_key_values=DynamicCache(), use_cache=True, return_dict=True)
            layers = out.past_key_values.layers
        except (AttributeError, LookupError, ValueError, TypeError) as error:
            if cache:
                raise _no_cache(model, "it keeps a state of another form") from error
        if layers and any(type(layer) is not DynamicLayer or layer.keys is None for layer in layers):
            layers = None
        if cache and not layers:
            raise _no_cache(model, "a layer keeps something other than keys and values")
    if not layers:
        out = model(**short, **({"use_cache": False} if task.cached else {}), return_dict=True)
    outputs = {n: out[n] for n in task.outputs if out.get(n) is not None}
    return outputs, [tuple(map(int, t.shape)) for layer in layers or () for t in (layer.keys, layer.values)]


def _no_cache(model: Any, reason: str) -> ExportError:
    return ExportError(
        f"{type(model).__name__}: a graph with a cache needs keys and values per layer "
        f"(past_key_values.N.key/value), which this architecture does not have: {reason}\n"
        "  hint   convert it with target `hf`, which needs no graph"
    )


def _axes(name: str, shape: Any) -> Axes:
    """Every text output is [batch, sequence, features], [batch, features], or a question's [batch, sequence]."""
    positions = len(shape) == 3 or name in ("start_logits", "end_logits")
    return ("batch", "sequence", *map(int, shape[2:])) if positions else ("batch", *map(int, shape[1:]))
