"""The calls of the graphs of a model that sees or hears.

A tower makes features of images; an embedding puts them at the image tokens of a text; the decoder reads embeddings.
The names of inputs and outputs are those of onnxruntime-genai.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers.cache_utils import DynamicLayer

from bridge.sources.live_models.flat_patches import GRIDS, example_patches, reads_patches
from bridge.targets.onnx.export.calls.grids import grid_rows
from bridge.targets.onnx.export.calls.images import Size, pixels_of, size_of
from bridge.targets.onnx.export.calls.states import CONV, GROWS, cache_of, filled, present, slots
from bridge.targets.onnx.export.calls.text import (
    BATCH,
    PAST,
    SEQUENCE,
    Axes,
    Call,
    Flat,
    Kept,
    Wrapped,
    dynamic_axes,
    extents,
    other_cache,
)
from bridge.targets.onnx.export.calls.towers import MASK, image_rows, patch_rows, sound_rows, tile_rows
from bridge.targets.onnx.export.family import family_of
from bridge.targets.onnx.files import TILE_ROWS, TILE_WEIGHTS
from bridge.targets.tasks import Task

QUESTION = ("qformer_input_ids", "qformer_attention_mask")  # what the queries of InstructBLIP read beside an image
EMBEDS, GRID, DEEP = "inputs_embeds", "image_grid_thw", "deepstack_embeds"
TILES = 5  # of the example
TOKENS = 7  # rows of features in the example: unlike every other extent of the examples


def multimodal_call(model: Any, task: Task, part: str, mode: Any, dtype: torch.dtype, image: Size | None) -> Call:
    """Return the call of `part` of `task`: "vision" or "speech", "embedding", "decoder"."""
    if call := family_of(model.config).call:
        return call(model, part, mode, dtype)
    if part == "embedding":
        return _embedding_call(model, mode, dtype, "image" if "vision" in task.parts else "audio")
    if part == "decoder":
        return _decoder_call(model, mode, dtype)
    if part == "speech":
        return _speech_call(model, mode, dtype)
    return _vision_call(model, mode, dtype, image)


class Vision(Wrapped):
    """The features of images, one row an image token, as wide as the decoder."""

    def forward(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
        if GRID in inputs:
            return grid_rows(self.model, inputs["pixel_values"], inputs[GRID])
        if GRIDS in inputs:
            return (patch_rows(self.model, inputs["pixel_values"], inputs[GRIDS]),)
        if TILE_ROWS in inputs:
            return (tile_rows(self.model, inputs["pixel_values"], inputs[TILE_ROWS], inputs.get(TILE_WEIGHTS)),)
        return (image_rows(self.model, **inputs),)


class _Speech(Wrapped):
    """The features of sound, as wide as the decoder, and how many rows are of each sound if the model counts them."""

    def forward(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
        return sound_rows(self.model, inputs)


class Embedding(Wrapped):
    """Embeddings of tokens, those of `token` replaced by rows of features, in order."""

    def __init__(self, model: nn.Module, token: int) -> None:
        super().__init__(model)
        self.token = token

    def forward(self, input_ids: Any, features: Any, deep: Any = None) -> tuple[Any, ...]:
        at = input_ids == self.token
        embeds = self.model.get_input_embeddings()(input_ids.masked_fill(at, 0))  # a table may end before `token`
        count = at.flatten().cumsum(0).view_as(input_ids)
        row = torch.where(at, count - 1, 0).clamp(max=features.shape[0])
        placed = torch.where(at.unsqueeze(-1), _ended(features)[row].to(embeds.dtype), embeds)
        return (placed, *([] if deep is None else [_ended(deep)[:, row] * at.unsqueeze(-1).to(deep.dtype)]))


def _ended(rows: torch.Tensor) -> torch.Tensor:
    """Rows with one of zeros behind them, so that a text alone has one to read."""
    return torch.cat([rows, rows.new_zeros(*rows.shape[:-2], 1, rows.shape[-1])], -2)


class _Deep(Flat):
    """A decoder that adds features to the states behind its first layers: Qwen3-VL. They are zeros at texts."""

    model: Any

    def forward(self, inputs: dict[str, Any], past: list[Any]) -> tuple[Any, ...]:
        text = self.model.model.language_model
        rest = {name: tensor for name, tensor in inputs.items() if name != DEEP}
        text._deepstack_process = lambda states, places, features: states + features
        try:
            out = text(
                **rest, past_key_values=filled(self.model.config, self.kinds, past), use_cache=True, return_dict=True,
                visual_pos_masks=rest["attention_mask"], deepstack_visual_embeds=list(inputs[DEEP].unbind(0)),
            )  # fmt: skip
        finally:
            del text._deepstack_process
        return (self.model.lm_head(out.last_hidden_state), *present(out.past_key_values))


def _vision_call(model: Any, mode: Any, dtype: torch.dtype, image: Size | None) -> Call:
    family = family_of(model.config)
    if family.vision:
        return family.vision(model, mode, dtype)
    if family.tiles:
        return _tiles_call(model, mode, dtype, family.tiles)
    if reads_patches(model):
        return _patches_call(model, mode, dtype)
    vision = model.config.vision_config
    if _has_grid(model):
        return _grid_call(model, mode, dtype)
    with mode:
        inputs = pixels_of(vision, size_of(vision, image), dtype)
        asked = [name for name in QUESTION if name in inspect.signature(model.forward).parameters]
        inputs |= {name: torch.ones(BATCH, SEQUENCE, dtype=torch.long) for name in asked}
    feeds: dict[str, Axes] = {"pixel_values": ("image_batch", *map(int, inputs["pixel_values"].shape[1:]))}
    feeds |= dict.fromkeys(asked, ("image_batch", "sequence"))
    most = model.config.qformer_config.max_position_embeddings if asked else None
    shapes = dynamic_axes(feeds, {"sequence": (None, most)})
    return Call(Vision(model), (inputs,), (shapes,), feeds, {"image_features": ("image_rows", width_of(model))})


def _tiles_call(model: Any, mode: Any, dtype: torch.dtype, parts: int) -> Call:
    """The tiles of one image, and which of their features stand in the text. parts: features that are added to one."""
    vision = model.config.vision_config
    with mode:
        pixels = torch.zeros(TILES, vision.num_channels, vision.image_size, vision.image_size, dtype=dtype)
        inputs = {"pixel_values": pixels, TILE_ROWS: torch.zeros(TOKENS, parts, dtype=torch.long)}
        inputs |= {TILE_WEIGHTS: torch.zeros(TOKENS, parts, dtype=dtype)} if parts > 1 else {}
    rows = Dim("image_rows")
    shapes = {name: {0: Dim("image_tiles") if name == "pixel_values" else rows} for name in inputs}
    feeds: dict[str, Axes] = {"pixel_values": ("image_tiles", *map(int, pixels.shape[1:]))}
    feeds |= {name: ("image_rows", parts) for name in inputs if name != "pixel_values"}
    return Call(Vision(model), (inputs,), (shapes,), feeds, {"image_features": ("image_rows", width_of(model))})


def _grid_call(model: Any, mode: Any, dtype: torch.dtype) -> Call:
    """The patches of one image of any size, and its grid."""
    vision = model.config.vision_config
    merge, width = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    with mode:
        patches = torch.zeros(12 * merge**2, width, dtype=dtype)
        inputs = {"pixel_values": patches, GRID: torch.tensor([[1, 3 * merge, 4 * merge]])}
    shapes = {"pixel_values": {0: merge**2 * Dim("squares", min=2)}, GRID: {}}
    feeds: dict[str, Axes] = {"pixel_values": ("image_patches", width), GRID: (1, 3)}
    gives: dict[str, Axes] = {"image_features": ("image_rows", width_of(model))}
    gives |= {"deepstack_features": (deep, "image_rows", width_of(model))} if (deep := _deep(model)) else {}
    return Call(Vision(model), (inputs,), (shapes,), feeds, gives)


def _patches_call(model: Any, mode: Any, dtype: torch.dtype) -> Call:
    """The patches of one image of any size, without those that fill up a batch, and its grid."""
    side = model.model.multi_modal_projector.factor
    with mode:
        example = example_patches(model, 1, 12 * side**2, dtype)
        inputs = {name: example[name] for name in ("pixel_values", GRIDS)}
    shapes = {"pixel_values": {1: side**2 * Dim("squares", min=2)}, GRIDS: {}}
    width = int(inputs["pixel_values"].shape[2])
    feeds: dict[str, Axes] = {"pixel_values": (1, "image_patches", width), GRIDS: (1, 2)}
    return Call(Vision(model), (inputs,), (shapes,), feeds, {"image_features": ("image_rows", width_of(model))})


def _speech_call(model: Any, mode: Any, dtype: torch.dtype) -> Call:
    config = model.config.audio_config
    bins, frames = config.num_mel_bins, 2 * config.max_source_positions
    with mode:
        inputs = {"input_features": torch.zeros(BATCH, bins, frames, dtype=dtype)}
        if family_of(model.config).masks_sound:
            inputs[MASK] = torch.ones(BATCH, frames, dtype=torch.long)
        rows = sound_rows(model, inputs)[0].shape[1]
    feeds: dict[str, Axes] = {name: ("audio_batch", *map(int, tensor.shape[1:])) for name, tensor in inputs.items()}
    shapes = {name: {0: Dim("audio_batch")} for name in inputs}
    gives: dict[str, Axes] = {"audio_features": ("audio_batch", int(rows), width_of(model))}
    gives |= {"audio_lengths": ("audio_batch",)} if MASK in inputs else {}
    return Call(_Speech(model), (inputs,), (shapes,), feeds, gives)


def _embedding_call(model: Any, mode: Any, dtype: torch.dtype, kind: str) -> Call:
    with mode:
        ids, features = (
            torch.zeros(BATCH, SEQUENCE, dtype=torch.long),
            torch.zeros(TOKENS, width_of(model), dtype=dtype),
        )
        more = (torch.zeros(deep, TOKENS, width_of(model), dtype=dtype),) if (deep := _deep(model)) else ()
    rows = Dim(f"{kind}_rows")
    shapes = ({0: Dim("batch"), 1: Dim("sequence")}, {0: rows}, *[{1: rows} for _ in more])
    feeds: dict[str, Axes] = {"input_ids": ("batch", "sequence"), f"{kind}_features": (f"{kind}_rows", width_of(model))}
    gives: dict[str, Axes] = {EMBEDS: ("batch", "sequence", width_of(model))}
    if deep:
        feeds["deepstack_features"] = (deep, f"{kind}_rows", width_of(model))
        gives[DEEP] = (deep, "batch", "sequence", width_of(model))
    module = (family_of(model.config).embedding or Embedding)(model, getattr(model.config, f"{kind}_token_id"))
    return Call(module, (ids, features, *more), shapes, feeds, gives)


def _decoder_call(model: Any, mode: Any, dtype: torch.dtype) -> Call:
    places = (3,) if _has_grid(model) else ()  # of a patch: time, row, column
    family = family_of(model.config)
    decoder, told = family.decoder or Flat, family.seen_by
    with mode:
        inputs = {
            EMBEDS: torch.zeros(BATCH, SEQUENCE, width_of(model), dtype=dtype),
            "attention_mask": torch.ones(BATCH, PAST + SEQUENCE, dtype=torch.long),
            "position_ids": torch.arange(PAST, PAST + SEQUENCE).expand(*places, BATCH, SEQUENCE).contiguous(),
        }
        kept = _kept(model, inputs | {"attention_mask": inputs["attention_mask"][:, PAST:]})
        if told:
            inputs[told] = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
        if deep := _deep(model):
            inputs[DEEP], decoder = torch.zeros(deep, BATCH, SEQUENCE, width_of(model), dtype=dtype), _Deep
        caches = [
            (f"{i}.{kind}", tuple(map(int, t.shape)), GROWS.get(kind, 0))
            for i, layer in enumerate(kept)
            for kind, t in layer
        ]
        pasts = [torch.zeros(extents(shape, at, BATCH, PAST), dtype=dtype) for _, shape, at in caches]
    batch, sequence, past = Dim("batch"), Dim("sequence"), Dim("past")
    # A Dim cannot express past + sequence: the mask's axis is left to torch.
    axes = {name: {0: batch, 1: Dim.DYNAMIC if name == "attention_mask" else sequence} for name in inputs}
    axes["position_ids"] = {len(places): batch, len(places) + 1: sequence}
    axes |= {DEEP: {1: batch, 2: sequence}} if deep else {}
    feeds: dict[str, Axes] = {
        EMBEDS: ("batch", "sequence", width_of(model)),
        "attention_mask": ("batch", "total_sequence"),
        "position_ids": (*places, "batch", "sequence"),
        **({told: ("batch", "sequence")} if told else {}),
    }
    feeds |= {DEEP: (deep, "batch", "sequence", width_of(model))} if deep else {}
    feeds |= {f"past_key_values.{slot}": extents(s, at, "batch", "past_sequence") for slot, s, at in caches}
    gives: dict[str, Axes] = {"logits": ("batch", "sequence", model.config.get_text_config().vocab_size)}
    gives |= {f"present.{slot}": extents(s, at, "batch", "total_sequence") for slot, s, at in caches}
    module = decoder(model, ("logits",), DynamicLayer, kept)
    grown = [{0: batch} | ({at: past} if at else {}) for _, _, at in caches]
    return Call(module, (inputs, pasts), (axes, grown), feeds, gives)


def _kept(model: Any, inputs: dict[str, Any]) -> Kept:
    """What each layer of the decoder keeps: keys and values, or the states of a convolution; ExportError for others."""
    cache = cache_of(model.config.get_text_config())
    writer = model.language_model if family_of(model.config).inner_decoder else model
    layers = writer(**inputs, past_key_values=cache, use_cache=True, return_dict=True).past_key_values.layers
    kept = tuple(slots(layer) or [] for layer in layers)
    if not kept or any([kind for kind, _ in layer] not in (["key", "value"], [CONV]) for layer in kept):
        raise other_cache(model)
    return kept


def _has_grid(model: Any) -> bool:
    """True for Qwen-VL: images of any size are patches, and tokens have places in three dimensions."""
    return hasattr(getattr(model.config, "vision_config", None), "temporal_patch_size")


def _deep(model: Any) -> int:
    """How many layers of the decoder have features of their own added (Qwen3-VL)."""
    tower = getattr(getattr(model, "model", None), "visual", None)
    return len(getattr(tower, "deepstack_visual_indexes", None) or ())


def width_of(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)
