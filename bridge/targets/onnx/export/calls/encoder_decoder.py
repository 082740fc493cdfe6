"""The calls of the two graphs of an encoder-decoder.

The encoder also computes the keys and values of cross-attention, once an input; the decoder takes them as they are,
beside its own cache, which grows. So no graph computes them again, and none needs a flag for the first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import MoEModelOutput

from bridge.targets.onnx.export.calls.images import Size, pixels_of, size_of
from bridge.targets.onnx.export.calls.sound import example_sounds, sound_masks
from bridge.targets.onnx.export.calls.states import filled
from bridge.targets.onnx.export.calls.text import (
    BATCH,
    PAST,
    SEQUENCE,
    Axes,
    Bounds,
    Call,
    Wrapped,
    dynamic_axes,
    other_cache,
)
from bridge.targets.tasks import Task

SOURCE = 7  # tokens of the example's source: unlike every other extent of the examples
KINDS = ("key", "value")
START = 0  # any token: what the encoder's graph takes of the decoder depends on none
STATES = "encoder_sequence"  # the axis of the encoder's states, if their number is not fixed
PATCHES = "image_patches"  # the same axis, where patches of an image of any size are read
MASK = "encoder_attention_mask"


def part_call(model: Any, task: Task, part: str, mode: Any, dtype: torch.dtype, image: Size | None) -> Call:
    """Return the call of `part`, "encoder" or "decoder". `image`: height and width, if the config gives none."""
    if found := sound_masks(model):
        found.settle(model)
    with mode:
        source = _source(model, task, dtype, image)
        kept = _kept(model, source.inputs)
    length: str | int = source.states or kept.cross[0][2]
    if part == "encoder":
        return _encoder_call(model, source, kept, length)
    return _decoder_call(model, mode, dtype, source, kept, length)


@dataclass(frozen=True)
class _Source:
    """What the encoder reads: example inputs, and their axes with bounds.

    `states`: the axis of the encoder's states if rows may be padded, "" if their number is fixed.
    """

    inputs: dict[str, Any]
    axes: dict[str, Axes]
    states: str = ""
    bounds: Bounds = field(default_factory=dict)


@dataclass(frozen=True)
class _Kept:
    """Shapes of the keys and values of cross-attention and of the decoder's own cache; the width of the states."""

    cross: list[tuple[int, ...]]
    own: list[tuple[int, ...]]
    width: int


class _Encoder(Wrapped):
    """The encoder's states, and keys and values of cross-attention; what else the decoder computes is dropped."""

    def forward(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
        batch = next(iter(inputs.values())).shape[0]
        start = torch.full((batch, 1), START, dtype=torch.long)
        masks = []
        if found := sound_masks(self.model):
            masks = [found.states(self.model, inputs["attention_mask"])]
            inputs = {**inputs, "attention_mask": found.taken(masks[0])}
        out = self.model(**inputs, decoder_input_ids=start, past_key_values=_empty(), use_cache=True)
        return out.encoder_last_hidden_state, *_flat(out.past_key_values.cross_attention_cache), *masks


class _Decoder(Wrapped):
    """Logits and the grown cache, from tokens, the source's mask, and flat lists of both caches."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__(model)
        self.width = width

    def forward(self, input_ids: Any, mask: dict[str, Any], own: list[Any], cross: list[Any]) -> tuple[Any, ...]:
        cache = EncoderDecoderCache(_filled(own), DynamicCache())
        cache.cross_attention_cache = _filled(cross)
        cache.is_updated = dict.fromkeys(range(len(cross) // 2), True)
        # Only its extents are read, for the mask; the class has every field that some decoder reads.
        states = MoEModelOutput(cross[0].new_zeros(cross[0].shape[0], cross[0].shape[2], self.width))
        states.attention_mask = mask.get(MASK)  # where Moonshine looks for it
        given = {"attention_mask": mask[MASK]} if mask else {}
        out = self.model(
            **given, decoder_input_ids=input_ids, encoder_outputs=states, past_key_values=cache, use_cache=True
        )
        return out.logits, *_flat(out.past_key_values.self_attention_cache)


def _source(model: Any, task: Task, dtype: torch.dtype, image: Size | None) -> _Source:
    """Token ids with their mask, sounds, or images and spectra of the config's extents."""
    name = model.main_input_name
    if name == "input_ids":
        names = [n for n in task.inputs if n in inspect.signature(model.forward).parameters]
        length = SOURCE + 2 * getattr(model.config, "global_block_size", 0)  # LongT5's, some of them
        inputs = {n: torch.ones(BATCH, length, dtype=torch.long) for n in names}  # one tensor twice is one input
        return _Source(inputs, dict.fromkeys(names, ("batch", STATES)), STATES, _positions(model))
    if name == "flattened_patches":
        width = int(model.config.vision_config.patch_embed_hidden_size) + 2  # each has its row and column before it
        patches = {name: torch.zeros(BATCH, SOURCE, width, dtype=dtype)}
        mask = {"attention_mask": torch.ones(BATCH, SOURCE, dtype=torch.long)}
        axes: dict[str, Axes] = {name: ("batch", PATCHES, width), "attention_mask": ("batch", PATCHES)}
        return _Source(patches | mask, axes, PATCHES)
    if name == "pixel_values":
        vision = model.config.encoder
        return _of_one_size(pixels_of(vision, size_of(vision, image), dtype))
    if sound_masks(model):
        inputs, axes, bounds = example_sounds(model, dtype)
        return _Source(inputs, axes, STATES, bounds)
    frames = 2 * model.config.max_source_positions
    return _of_one_size({name: torch.zeros(BATCH, model.config.num_mel_bins, frames, dtype=dtype)})


def _of_one_size(inputs: dict[str, Any]) -> _Source:
    return _Source(inputs, {n: ("batch", *map(int, t.shape[1:])) for n, t in inputs.items()})


def _kept(model: Any, inputs: Mapping[str, Any]) -> _Kept:
    """Run the model once on fake tensors, of sounds without a mask."""
    start = torch.full((BATCH, 1), START, dtype=torch.long)
    whole = {n: t for n, t in inputs.items() if n == model.main_input_name or not sound_masks(model)}
    out = model(**whole, decoder_input_ids=start, past_key_values=_empty(), use_cache=True)
    cache = out.past_key_values
    layers = [*cache.cross_attention_cache.layers, *cache.self_attention_cache.layers]
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        raise other_cache(model)
    cross, own = (
        [tuple(map(int, t.shape)) for t in _flat(part)]
        for part in (cache.cross_attention_cache, cache.self_attention_cache)
    )
    return _Kept(cross, own, int(out.encoder_last_hidden_state.shape[-1]))


def _encoder_call(model: Any, source: _Source, kept: _Kept, length: str | int) -> Call:
    gives: dict[str, Axes] = {"last_hidden_state": ("batch", length, kept.width)}
    gives |= {f"present.{slot}": ("batch", s[1], length, s[3]) for slot, s in _slots("encoder", kept.cross)}
    gives |= {MASK: ("batch", length)} if sound_masks(model) else {}
    # LongT5 fills up its blocks unless they are full, which would be by none, and asks whether there are global ones.
    blocks = hasattr(model.config, "encoder_attention_type")
    shapes = dynamic_axes(source.axes, source.bounds, STATES if blocks else "")
    return Call(_Encoder(model), (source.inputs,), (shapes,), source.axes, gives)


def _decoder_call(model: Any, mode: Any, dtype: torch.dtype, source: _Source, kept: _Kept, length: str | int) -> Call:
    extent = SOURCE if isinstance(length, str) else length
    with mode:
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
        mask = {MASK: torch.ones(BATCH, extent, dtype=torch.long)} if source.states else {}
        own = [torch.zeros(BATCH, s[1], PAST, s[3], dtype=dtype) for s in kept.own]
        cross = [torch.zeros(BATCH, s[1], extent, s[3], dtype=dtype) for s in kept.cross]
    text: dict[str, Axes] = {"input_ids": ("batch", "sequence")}
    masks: dict[str, Axes] = {n: ("batch", length) for n in mask}
    past = "past_key_values."
    grown = {past + slot: ("batch", s[1], "past_sequence", s[3]) for slot, s in _slots("decoder", kept.own)}
    given = {past + slot: ("batch", s[1], length, s[3]) for slot, s in _slots("encoder", kept.cross)}
    feeds: dict[str, Axes] = {**text, **masks, **grown, **given}
    axes = dynamic_axes(feeds, {**_bounds(model), **source.bounds})
    shapes = (axes["input_ids"], {n: axes[n] for n in masks}, [axes[n] for n in grown], [axes[n] for n in given])
    vocabulary = getattr(model.config, "vocab_size", None) or model.get_decoder().config.vocab_size
    gives: dict[str, Axes] = {"logits": ("batch", "sequence", int(vocabulary))}
    gives |= {f"present.{slot}": ("batch", s[1], "total_sequence", s[3]) for slot, s in _slots("decoder", kept.own)}
    return Call(_Decoder(model, kept.width), (ids, mask, own, cross), shapes, feeds, gives)


def _slots(part: str, shapes: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    names = [f"{layer}.{part}.{kind}" for layer in range(len(shapes) // 2) for kind in KINDS]
    return list(zip(names, shapes, strict=True))


def _bounds(model: Any) -> Bounds:
    """The least and the most tokens and states at once.

    torch does not trace the mask of eager attention for one as well, but the graph holds for one. A table of sines has
    an end; torch finds the end of other tables itself.
    """
    decoder = getattr(model.config, "decoder", model.config)
    least = 2 if decoder._attn_implementation == "eager" else None
    parts = [module for name, module in model.named_modules() if "decoder" in name]
    tables = [module for module in parts if torch.is_tensor(getattr(module, "weights", None))]
    ends = [table.weights.shape[0] - table.padding_idx - 1 for table in tables]
    return {"sequence": (least, min(ends, default=None)), STATES: (least, None), PATCHES: (least, None)}


def _positions(model: Any) -> Bounds:
    """A text has one token, and torch needs the end of a learned table of positions; relative ones have none."""
    most = getattr(model.config, "max_position_embeddings", None)
    return {STATES: (1, most if isinstance(most, int) else None)}


def _empty() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def _filled(tensors: list[Any]) -> DynamicCache:
    return filled(None, [list(KINDS)] * (len(tensors) // 2), tensors)


def _flat(cache: Any) -> list[Any]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
