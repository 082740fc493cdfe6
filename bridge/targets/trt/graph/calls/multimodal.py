"""The calls of the graphs of a model that sees and writes.

A tower makes features of images; an embedding puts them at the image tokens of a text; the decoder reads embeddings.
The names of inputs and outputs are those of onnxruntime-genai.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers.cache_utils import DynamicCache, DynamicLayer

from bridge.core.errors import ExportError
from bridge.targets.trt.graph.calls.images import Size, pixels_of, size_of
from bridge.targets.trt.graph.calls.states import cache_of, filled, slots
from bridge.targets.trt.graph.calls.text import BATCH, PAST, SEQUENCE, Axes, Call, Flat

FEATURES = {"vision": "image_features", "speech": "audio_features"}
EMBEDS = "inputs_embeds"
TOKENS = 7  # rows of features in the example: unlike every other extent of the examples


def multimodal_call(model: Any, part: str, mode: Any, dtype: torch.dtype, image: Size | None) -> Call:
    """Return the call of `part`: "vision", "embedding" or "decoder"."""
    if part == "embedding":
        return _embedding_call(model, mode, dtype)
    if part == "decoder":
        return _decoder_call(model, mode, dtype)
    return _vision_call(model, mode, dtype, image)


class _Vision(nn.Module):
    """The features of images, one row an image token, as wide as the decoder."""

    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
        with _whole(self.model):
            made = self.model.get_image_features(**inputs, return_dict=True).pooler_output
        return (made.reshape(-1, made.shape[-1]),)


@contextmanager
def _whole(model: Any) -> Iterator[None]:
    """Let `list(tensor)` be the tensor in the module of `model`: LLaVA lists the features of each image, at the end.

    A list would fix the number of images to the example's.
    """
    scope = vars(sys.modules[type(model).__module__])
    scope["list"] = lambda values: values if isinstance(values, torch.Tensor) else list(values)
    try:
        yield
    finally:
        del scope["list"]


class _Embedding(nn.Module):
    """Embeddings of tokens, those of `token` replaced by rows of features, in order."""

    model: Any

    def __init__(self, model: nn.Module, token: int) -> None:
        super().__init__()
        self.model, self.token = model, token

    def forward(self, input_ids: Any, features: Any) -> tuple[Any, ...]:
        at = input_ids == self.token
        embeds = self.model.get_input_embeddings()(input_ids.masked_fill(at, 0))  # a table may end before `token`
        rows = torch.cat([features, features.new_zeros(1, features.shape[1])])  # so that no row is none too few
        count = at.flatten().cumsum(0).view_as(input_ids)
        row = torch.where(at, count - 1, 0).clamp(max=features.shape[0])
        return (torch.where(at.unsqueeze(-1), rows[row].to(embeds.dtype), embeds),)


class _ImagesAtOnce(Flat):
    """A decoder in which the tokens of an image see each other, also later ones: Gemma 3. Its inputs have the ids."""

    model: Any

    def forward(self, inputs: dict[str, Any], past: list[Any]) -> tuple[Any, ...]:
        ids = inputs["input_ids"]
        types = (ids == self.model.config.image_token_id).long()
        whole = torch.cat([types.new_zeros(ids.shape[0], past[0].shape[2]), types], 1)
        rest = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
        return super().forward({**rest, "token_type_ids": whole}, past)


class _Empty(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """A cache that says it is empty: only then does PaliGemma read which tokens are the prefix."""

    is_initialized = False


class _PrefixAtOnce(Flat):
    """A decoder in which all tokens of type 0 see each other: PaliGemma. Past tokens are of type 1 to those."""

    def forward(self, inputs: dict[str, Any], past: list[Any]) -> tuple[Any, ...]:
        types, cache = inputs["token_type_ids"], filled(self.kinds, past)
        whole = torch.cat([types.new_ones(types.shape[0], past[0].shape[2]), types], 1)
        cache.__class__ = _Empty
        out = self.model(**{**inputs, "token_type_ids": whole}, past_key_values=cache, use_cache=True)
        present = (tensor for layer in out.past_key_values.layers for _, tensor in slots(layer))
        return (out.logits, *present)


# Model type of transformers -> its decoder, and the input that says which tokens see each other.
_AT_ONCE: dict[str, tuple[type[Flat], str]] = {
    "gemma3": (_ImagesAtOnce, "input_ids"), "paligemma": (_PrefixAtOnce, "token_type_ids"),
}  # fmt: skip


def _vision_call(model: Any, mode: Any, dtype: torch.dtype, image: Size | None) -> Call:
    vision = model.config.vision_config
    with mode:
        inputs = pixels_of(vision, size_of(vision, image), dtype)
    feeds: dict[str, Axes] = {"pixel_values": ("image_batch", *map(int, inputs["pixel_values"].shape[1:]))}
    shapes = {"pixel_values": {0: Dim("image_batch")}}
    return Call(_Vision(model), (inputs,), (shapes,), feeds, {FEATURES["vision"]: ("image_rows", _width(model))})


def _embedding_call(model: Any, mode: Any, dtype: torch.dtype) -> Call:
    with mode:
        ids, features = torch.zeros(BATCH, SEQUENCE, dtype=torch.long), torch.zeros(TOKENS, _width(model), dtype=dtype)
    shapes = ({0: Dim("batch"), 1: Dim("sequence")}, {0: Dim("image_rows")})
    feeds: dict[str, Axes] = {
        "input_ids": ("batch", "sequence"),
        FEATURES["vision"]: ("image_rows", _width(model)),
    }
    module = _Embedding(model, model.config.image_token_id)
    return Call(module, (ids, features), shapes, feeds, {EMBEDS: ("batch", "sequence", _width(model))})


def _decoder_call(model: Any, mode: Any, dtype: torch.dtype) -> Call:
    decoder, told = _AT_ONCE.get(model.config.model_type, (Flat, ""))
    with mode:
        inputs = {
            EMBEDS: torch.zeros(BATCH, SEQUENCE, _width(model), dtype=dtype),
            "attention_mask": torch.ones(BATCH, PAST + SEQUENCE, dtype=torch.long),
            "position_ids": torch.arange(PAST, PAST + SEQUENCE).expand(BATCH, SEQUENCE).contiguous(),
        }
        kept = _kept(model, {name: tensor[:, -SEQUENCE:] for name, tensor in inputs.items()})
        if told:
            inputs[told] = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
        caches = [(f"{i}.{kind}", tuple(map(int, t.shape))) for i, layer in enumerate(kept) for kind, t in layer]
        pasts = [torch.zeros(BATCH, s[1], PAST, s[3], dtype=dtype) for _, s in caches]
    batch, sequence, past = Dim("batch"), Dim("sequence"), Dim("past")
    # A Dim cannot express past + sequence: the mask's axis is left to torch.
    axes = {name: {0: batch, 1: Dim.DYNAMIC if name == "attention_mask" else sequence} for name in inputs}
    feeds: dict[str, Axes] = {
        EMBEDS: ("batch", "sequence", _width(model)),
        "attention_mask": ("batch", "total_sequence"),
        "position_ids": ("batch", "sequence"),
        **({told: ("batch", "sequence")} if told else {}),
    }
    feeds |= {f"past_key_values.{slot}": ("batch", s[1], "past_sequence", s[3]) for slot, s in caches}
    gives: dict[str, Axes] = {"logits": ("batch", "sequence", model.config.get_text_config().vocab_size)}
    gives |= {f"present.{slot}": ("batch", s[1], "total_sequence", s[3]) for slot, s in caches}
    module = decoder(model, ("logits",), DynamicLayer, kept)
    return Call(module, (inputs, pasts), (axes, [{0: batch, 2: past}] * len(pasts)), feeds, gives)


def _kept(model: Any, inputs: dict[str, Any]) -> tuple[list[tuple[str, Any]], ...]:
    """Keys and values of each layer of the decoder; ExportError if a layer keeps anything else."""
    cache = cache_of(model.config.get_text_config())
    layers = model(**inputs, past_key_values=cache, use_cache=True, return_dict=True).past_key_values.layers
    kept = tuple(slots(layer) for layer in layers)
    if not kept or any([kind for kind, _ in layer] != ["key", "value"] for layer in kept):
        raise ExportError(
            f"{type(model).__name__}: its decoder keeps something other than keys and values of all tokens\n"
            "  hint   convert it with target `hf`, which needs no graph"
        )
    return kept


def _width(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)
