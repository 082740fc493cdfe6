"""Llama 3.2 Vision, whose decoder reads images by cross-attention.

The tower's graph also computes the keys and values of cross-attention, once for its images; the
decoder takes them as they are at every step, beside its own cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim
from transformers.cache_utils import DynamicCache, DynamicLayer

from bridge.targets.onnx.export.calls.states import filled
from bridge.targets.onnx.export.calls.text import BATCH, PAST, SEQUENCE, Axes, Call, Flat, Wrapped
from bridge.targets.onnx.export.family import Family

EMBEDS, MASK = "inputs_embeds", "cross_attention_mask"
KINDS = ("key", "value")
IMAGES = 4  # of a row of the example: unlike every other extent of the examples


def _call(model: Any, part: str, mode: Any, dtype: torch.dtype) -> Call:
    """Return the call of `part`: "vision", "embedding" or "decoder"."""
    if part == "embedding":
        return _embedding_call(model, mode)
    return _vision_call(model, mode, dtype) if part == "vision" else _decoder_call(model, mode, dtype)


class _Vision(Wrapped):
    """Keys and values of all layers of cross-attention; what these compute beside them is dropped."""

    def forward(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
        decoder, cache = self.model.model.language_model, DynamicCache()
        seen = self.model.model.vision_model(**inputs).last_hidden_state  # batch, images, tiles, patches, features
        states = self.model.model.multi_modal_projector(seen).flatten(1, 3)
        token = states[:, :1]
        for layer in decoder.cross_attention_layers:
            attention = decoder.layers[layer].cross_attn
            attention(hidden_states=token, cross_attention_states=states, past_key_values=cache)
        kept = [cache.layers[layer] for layer in decoder.cross_attention_layers]
        return tuple(tensor for layer in kept for tensor in (layer.keys, layer.values))


class _Embedding(Wrapped):
    """Embeddings of tokens; the token of an image has one, too."""

    def forward(self, input_ids: Any) -> Any:
        return self.model.get_input_embeddings()(input_ids)


class _Decoder(Flat):
    """A decoder whose layers of cross-attention have their keys and values in `past`, and give none."""

    model: Any

    def forward(self, inputs: dict[str, Any], past: list[Any]) -> tuple[Any, ...]:
        cache = filled(self.model.config, self.kinds, past)
        # transformers subtracts it from 1.0, and torch translates no 1.0 - whole number
        mask = inputs[MASK].to(inputs[EMBEDS].dtype)
        out = self.model(**{**inputs, MASK: mask}, past_key_values=cache, use_cache=True, return_dict=True)
        crossed = self.model.model.language_model.cross_attention_layers
        own = [layer for at, layer in enumerate(cache.layers) if at not in crossed]
        return (out.logits, *(tensor for layer in own for tensor in (layer.keys, layer.values)))


def _vision_call(model: Any, mode: Any, dtype: torch.dtype) -> Call:
    vision = model.config.vision_config
    tiles, side = vision.max_num_tiles, vision.image_size
    with mode:
        inputs = {
            "pixel_values": torch.zeros(BATCH, IMAGES, tiles, vision.num_channels, side, side, dtype=dtype),
            "aspect_ratio_ids": torch.ones(BATCH, IMAGES, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(BATCH, IMAGES, tiles, dtype=torch.long),
        }
    feeds: dict[str, Axes] = {n: ("batch", "images", *map(int, tensor.shape[2:])) for n, tensor in inputs.items()}
    shapes = {name: {0: Dim("batch"), 1: Dim("images")} for name in inputs}
    gives: dict[str, Axes] = {f"present.{slot}": _extents(model) for slot in _slots(model)}
    return Call(_Vision(model), (inputs,), (shapes,), feeds, gives)


def _embedding_call(model: Any, mode: Any) -> Call:
    with mode:
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    axes: Axes = ("batch", "sequence")
    gives: dict[str, Axes] = {EMBEDS: (*axes, int(model.config.text_config.hidden_size))}
    return Call(_Embedding(model), (ids,), ({0: Dim("batch"), 1: Dim("sequence")},), {"input_ids": axes}, gives)


def _decoder_call(model: Any, mode: Any, dtype: torch.dtype) -> Call:
    text, vision = model.config.text_config, model.config.vision_config
    crossed = model.model.language_model.cross_attention_layers
    count, heads, width = text.num_hidden_layers, text.num_key_value_heads, _width(text)
    names = [f"{at}.encoder" if at in crossed else f"{at}" for at in range(count)]
    slots = [f"{name}.{kind}" for name in names for kind in KINDS]
    with mode:
        inputs = {
            EMBEDS: torch.zeros(BATCH, SEQUENCE, text.hidden_size, dtype=dtype),
            "attention_mask": torch.ones(BATCH, PAST + SEQUENCE, dtype=torch.long),
            "position_ids": torch.arange(PAST, PAST + SEQUENCE).expand(BATCH, SEQUENCE).contiguous(),
            MASK: torch.ones(BATCH, SEQUENCE, IMAGES, vision.max_num_tiles, dtype=torch.long),
        }
        extents = [IMAGES * _positions(model) if ".encoder." in slot else PAST for slot in slots]
        pasts = [torch.zeros(BATCH, heads, extent, width, dtype=dtype) for extent in extents]
    batch, sequence, past, images = Dim("batch"), Dim("sequence"), Dim("past"), Dim("images")
    # A Dim cannot express past + sequence: the mask's axis is left to torch.
    axes: dict[str, Any] = {n: {0: batch, 1: Dim.DYNAMIC if n == "attention_mask" else sequence} for n in inputs}
    axes[MASK][2] = images
    positions = _positions(model) * images
    grown = [{0: batch, 2: positions if ".encoder." in slot else past} for slot in slots]
    own: Axes = ("batch", heads, "past_sequence", width)
    feeds: dict[str, Axes] = {
        EMBEDS: ("batch", "sequence", text.hidden_size),
        "attention_mask": ("batch", "total_sequence"),
        "position_ids": ("batch", "sequence"),
        MASK: ("batch", "sequence", "images", vision.max_num_tiles),
    }
    feeds |= {f"past_key_values.{slot}": _extents(model) if ".encoder." in slot else own for slot in slots}
    gives: dict[str, Axes] = {"logits": ("batch", "sequence", text.vocab_size)}
    gives |= {f"present.{slot}": ("batch", heads, "total_sequence", width) for slot in slots if ".encoder." not in slot}
    module = _Decoder(model, ("logits",), DynamicLayer, tuple([(kind, None) for kind in KINDS] for _ in names))
    return Call(module, (inputs, pasts), (axes, grown), feeds, gives)


def _slots(model: Any) -> list[str]:
    """Names of the keys and values of cross-attention."""
    return [f"{at}.encoder.{kind}" for at in model.model.language_model.cross_attention_layers for kind in KINDS]


def _extents(model: Any) -> Axes:
    """Axes of keys and values of cross-attention."""
    text = model.config.text_config
    return ("batch", text.num_key_value_heads, "image_positions", _width(text))


def _width(text: Any) -> int:
    return int(text.hidden_size // text.num_attention_heads)


def _positions(model: Any) -> int:
    """How many positions of keys an image has: patches of all its tiles."""
    return int(model.config.vision_config.max_num_tiles * model.model.vision_model.num_patches)


FAMILY = Family(call=_call)
