"""The calls of the two graphs of an encoder-decoder.

The encoder also computes the keys and values of cross-attention, once an input; the decoder takes them as they are,
beside its own cache, which grows. So no graph computes them again, and none needs a flag for the first step.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import MoEModelOutput

from bridge.core.errors import ExportError
from bridge.targets.trt.graph.calls.states import filled
from bridge.targets.trt.graph.calls.text import BATCH, PAST, SEQUENCE, Axes, Call
from bridge.targets.trt.graph.tasks import Task

SOURCE = 7  # tokens of the example's source: unlike every other extent of the examples
KINDS = ("key", "value")
START = 0  # any token: what the encoder's graph takes of the decoder depends on none


def part_call(model: Any, task: Task, part: str, mode: Any, dtype: torch.dtype) -> Call:
    """Return the call of `part`, "encoder" or "decoder"."""
    with mode:
        inputs, axes = _source(model, task, dtype)
        cross, own = _caches(model, inputs)
    length: str | int = "encoder_sequence" if _is_text(model) else cross[0][2]
    if part == "encoder":
        return _encoder_call(model, inputs, axes, cross, length)
    return _decoder_call(model, mode, dtype, cross, own, length)


class _Encoder(nn.Module):
    """The encoder's states, and keys and values of cross-attention; what else the decoder computes is dropped."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
        batch = next(iter(inputs.values())).shape[0]
        start = torch.full((batch, 1), START, dtype=torch.long)
        out = self.model(**inputs, decoder_input_ids=start, past_key_values=_empty(), use_cache=True)
        return out.encoder_last_hidden_state, *_flat(out.past_key_values.cross_attention_cache)


class _Decoder(nn.Module):
    """Logits and the grown cache, from tokens, the source's mask, and flat lists of both caches."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.width = model, width

    def forward(self, input_ids: Any, mask: dict[str, Any], own: list[Any], cross: list[Any]) -> tuple[Any, ...]:
        cache = EncoderDecoderCache(_filled(own), DynamicCache())
        cache.cross_attention_cache = _filled(cross)
        cache.is_updated = dict.fromkeys(range(len(cross) // 2), True)
        # Only its extents are read, for the mask.
        states = cross[0].new_zeros(cross[0].shape[0], cross[0].shape[2], self.width)
        given = {"attention_mask": mask["encoder_attention_mask"]} if mask else {}
        out = self.model(
            **given,
            decoder_input_ids=input_ids,
            encoder_outputs=MoEModelOutput(last_hidden_state=states),  # has every field that some decoder reads
            past_key_values=cache,
            use_cache=True,
        )
        return out.logits, *_flat(out.past_key_values.self_attention_cache)


def _source(model: Any, task: Task, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Axes]]:
    """Example inputs of the encoder and their axes: token ids with their mask, or spectra of the config's length."""
    if _is_text(model):
        names = [n for n in task.inputs if n in inspect.signature(model.forward).parameters]
        inputs = {n: torch.ones(BATCH, SOURCE, dtype=torch.long) for n in names}  # one tensor twice is one input
        return inputs, dict.fromkeys(names, ("batch", "encoder_sequence"))
    bins, frames = model.config.num_mel_bins, 2 * model.config.max_source_positions
    return {"input_features": torch.zeros(BATCH, bins, frames, dtype=dtype)}, {
        "input_features": ("batch", bins, frames)
    }


def _is_text(model: Any) -> bool:
    return bool(model.main_input_name == "input_ids")


def _caches(model: Any, inputs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Shapes of the keys and values of cross-attention and of the decoder's own cache, layer by layer."""
    start = torch.full((BATCH, 1), START, dtype=torch.long)
    out = model(**inputs, decoder_input_ids=start, past_key_values=_empty(), use_cache=True)
    cache = out.past_key_values
    layers = [*cache.cross_attention_cache.layers, *cache.self_attention_cache.layers]
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        raise ExportError(
            f"{type(model).__name__}: its decoder keeps something other than keys and values of all tokens\n"
            "  hint   convert it with target `hf`, which needs no graph"
        )
    cross, own = (
        [tuple(map(int, t.shape)) for t in _flat(part)]
        for part in (cache.cross_attention_cache, cache.self_attention_cache)
    )
    return cross, own


def _encoder_call(
    model: Any, inputs: dict[str, Any], feeds: dict[str, Axes], cross: list[Any], length: str | int
) -> Call:
    batch, sequence = Dim("batch"), Dim("encoder_sequence", max=_positions(model, "max_position_embeddings"))
    dims = {"batch": batch, "encoder_sequence": sequence}
    shapes = {n: {i: dims[a] for i, a in enumerate(axes) if isinstance(a, str)} for n, axes in feeds.items()}
    gives: dict[str, Axes] = {"last_hidden_state": ("batch", length, _number(model, "hidden_size"))}
    gives |= {f"present.{slot}": ("batch", s[1], length, s[3]) for slot, s in _slots("encoder", cross)}
    return Call(_Encoder(model), (inputs,), (shapes,), feeds, gives)


def _decoder_call(
    model: Any, mode: Any, dtype: torch.dtype, cross: list[Any], own: list[Any], length: str | int
) -> Call:
    batch, sequence, past = Dim("batch"), Dim("sequence"), Dim("past")
    text = isinstance(length, str)
    source = Dim("encoder_sequence", max=_positions(model, "max_position_embeddings")) if text else None
    extent = SOURCE if isinstance(length, str) else length
    with mode:
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
        mask = {"encoder_attention_mask": torch.ones(BATCH, extent, dtype=torch.long)} if text else {}
        pasts = [torch.zeros(BATCH, s[1], PAST, s[3], dtype=dtype) for s in own]
        crossed = [torch.zeros(BATCH, s[1], extent, s[3], dtype=dtype) for s in cross]
    by_source = {0: batch, 2: source} if text else {0: batch}
    shapes = (
        {0: batch, 1: sequence},
        {n: {0: batch, 1: source} for n in mask},
        [{0: batch, 2: past}] * len(pasts),
        [by_source] * len(crossed),
    )
    feeds: dict[str, Axes] = {"input_ids": ("batch", "sequence"), **{n: ("batch", length) for n in mask}}
    feeds |= {f"past_key_values.{slot}": ("batch", s[1], "past_sequence", s[3]) for slot, s in _slots("decoder", own)}
    feeds |= {f"past_key_values.{slot}": ("batch", s[1], length, s[3]) for slot, s in _slots("encoder", cross)}
    gives: dict[str, Axes] = {"logits": ("batch", "sequence", _number(model, "vocab_size"))}
    gives |= {f"present.{slot}": ("batch", s[1], "total_sequence", s[3]) for slot, s in _slots("decoder", own)}
    module = _Decoder(model, _number(model, "hidden_size"))
    return Call(module, (ids, mask, pasts, crossed), shapes, feeds, gives)


def _slots(part: str, shapes: list[Any]) -> list[tuple[str, Any]]:
    names = [f"{layer}.{part}.{kind}" for layer in range(len(shapes) // 2) for kind in KINDS]
    return list(zip(names, shapes, strict=True))


def _number(model: Any, key: str) -> int:
    """A number of the config, or of its decoder's."""
    return int(getattr(model.config, key, None) or getattr(model.config.decoder, key))


def _positions(model: Any, key: str) -> int | None:
    """A bound of a learned table of positions, which torch needs; relative positions have none."""
    bound = getattr(model.config, key, None)
    return bound if isinstance(bound, int) else None


def _empty() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def _filled(tensors: list[Any]) -> DynamicCache:
    return filled(None, [list(KINDS)] * (len(tensors) // 2), tensors)


def _flat(cache: Any) -> list[Any]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
