"""config.json and generation_config.json of a written checkpoint: the source's, with what a runtime needs added."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bridge.planning import Plan


def config_json(config: Mapping[str, Any], quantization: Mapping[str, Any] | None, untied: bool) -> bytes:
    """The source's config as it is, `quantization_config` last; `untied`: the head is a tensor of its own now."""
    said = dict(config)
    _repair_rope(said)
    _repair_layer_types(said)
    if untied:
        said["tie_word_embeddings"] = False
    if quantization is not None:
        said.pop("quantization_config", None)
        said["quantization_config"] = quantization
    return json.dumps(said, indent=4).encode()


def untied_head(plan: Plan) -> bool:
    """True where a head that the source ties to the embedding is quantized, and so written beside it."""
    return bool(plan.untied)


def generation_config(content: bytes) -> bytes:
    """The source's generation_config.json; one that samples says so, since transformers refuses it otherwise."""
    said = json.loads(content)
    samples = said.get("top_k") is not None or said.get("top_p") is not None
    if not samples or said.get("do_sample") is True:
        return content
    return (json.dumps(said | {"do_sample": True}, indent=2, sort_keys=True) + "\n").encode()


def _repair_rope(config: dict[str, Any]) -> None:
    """Llama 3's RoPE carries its theta inside: runtimes read it there."""
    theta = config.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if theta is None or not isinstance(rope, dict) or "rope_theta" in rope:
            continue
        if rope.get("rope_type", rope.get("type")) == "llama3":
            config[key] = rope | {"rope_theta": theta}


def _repair_layer_types(config: dict[str, Any]) -> None:
    """Draft layers for multi-token prediction are no layers of the model: their types are cut off."""
    layers, types = config.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(layers, int) and isinstance(types, list):
        drafted = config.get("num_nextn_predict_layers")
        if len(types) - layers == drafted != 0:
            config["layer_types"] = types[:layers]
