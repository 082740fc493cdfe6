"""How many tokens a model has positions for, by transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.tables.model_types import sizes_of


def positions(config: Mapping[str, Any]) -> int | None:
    """The positions of the tokens that a model reads: those of its encoder if it has one beside a decoder."""
    return encoder_length(config) if config.get("is_encoder_decoder") else context_length(config)


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """The tokens of a model, or of its text model; None if its config does not say."""
    text = config.get("text_config")
    value = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, Mapping) else None)
    return value if type(value) is int else None


def context_length(config: Mapping[str, Any]) -> int | None:
    """The positions that a model, or the part of it that writes text, was made for; None if its config does not say."""
    names = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "n_positions")
    return _first_number(config, ("text_config", "decoder"), (*names, "max_seq_len"))


def encoder_length(config: Mapping[str, Any]) -> int | None:
    """How many tokens the encoder of an encoder-decoder has positions for; None if it has a distance for each pair."""
    if not config.get("is_encoder_decoder"):
        return None
    names = ("max_encoder_position_embeddings", "max_source_positions", "max_position_embeddings")
    return _first_number(config, ("encoder",), names)


def image_positions(config: Mapping[str, Any]) -> int:
    """How many keys an image has in layers of cross-attention: patches and a class of each tile; 0 without such layers.

    Numbers that config.json leaves out are transformers' defaults.
    """
    defaults = sizes_of("cross_attention_image", config.get("model_type"))
    if defaults is None:
        return 0
    vision = defaults | dict(config.get("vision_config") or {})
    side = int(vision["image_size"]) // int(vision["patch_size"])
    return int(vision["max_num_tiles"]) * (side * side + 1)


def _first_number(config: Mapping[str, Any], parts: tuple[str, ...], names: tuple[str, ...]) -> int | None:
    within = [config, *(part for part in map(config.get, parts) if isinstance(part, Mapping))]
    values = (part.get(name) for part in within for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
