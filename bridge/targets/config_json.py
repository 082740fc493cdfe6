"""config.json and generation_config.json of a written checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.output.names import GENERATION
from bridge.sources.quantized.fields import BESIDE


def config_json(config: Mapping[str, Any], quantization: Mapping[str, Any] | None, untied: bool) -> bytes:
    """The source's config with `quantization_config` last. `untied`: the head is now a tensor of its own."""
    from bridge.sources.configs.diffusion import without_architecture  # loads numpy

    result = without_architecture(config)
    _repair_rope(result)
    _repair_layer_types(result)
    if untied:
        result["tie_word_embeddings"] = False
    if quantization is not None:
        for old in ("quantization_config", BESIDE):
            result.pop(old, None)
        result["quantization_config"] = quantization
    return json.dumps(result, indent=4).encode()


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config of the same model with weights in `dtype`, under the name that it has there; also of its parts."""
    words = ("dtype", "torch_dtype")
    result = {key: dtype if key in words and value is not None else value for key, value in config.items()}
    result |= {key: with_dtype(value, dtype) for key, value in config.items() if _any_of(words, value)}
    return result


def restated(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config of a model that is written in another dtype than its source's; diffusers' configs state none."""
    from bridge.sources.configs.diffusion import is_diffusion  # loads numpy

    return with_dtype(config if is_diffusion(config) else {**config, "dtype": dtype}, dtype)


def _any_of(words: Collection[str], value: object) -> bool:
    return isinstance(value, Mapping) and any(value.get(word) is not None for word in words)


def generation_settings(files: Mapping[str, Path | bytes]) -> dict[str, Any]:
    """The source's generation_config.json, {} without one; SourceError if it is broken."""
    from bridge.sources.config_json import read_json  # loads numpy

    return read_json(files[GENERATION], GENERATION) if GENERATION in files else {}


def generation_problems(files: Mapping[str, Path | bytes]) -> list[tuple[str, str]]:
    """Why generation_config.json cannot be read, for a plan; none if it can, or if there is none."""
    try:
        generation_settings(files)
    except SourceError as error:
        why = str(error).removeprefix(f"{GENERATION}: ")
        return [(GENERATION, f"{why}; mend the file, or remove it: it is not needed")]
    return []


def generation_config(file: Path | bytes) -> bytes:
    """The source's generation_config.json, with `do_sample` set if it samples; transformers refuses it otherwise."""
    settings = generation_settings({GENERATION: file})
    samples = settings.get("top_k") is not None or settings.get("top_p") is not None
    if not samples or settings.get("do_sample") is True:
        return file if isinstance(file, bytes) else file.read_bytes()
    return (json.dumps(settings | {"do_sample": True}, indent=2, sort_keys=True) + "\n").encode()


def _repair_rope(config: dict[str, Any]) -> None:
    """Copy theta into Llama 3's RoPE parameters, where runtimes read it."""
    theta = config.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if theta is None or not isinstance(rope, dict) or "rope_theta" in rope:
            continue
        if rope.get("rope_type", rope.get("type")) == "llama3":
            config[key] = rope | {"rope_theta": theta}


def _repair_layer_types(config: dict[str, Any]) -> None:
    """Drop the types of draft layers for multi-token prediction, which are not layers of the model."""
    layers, types = config.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(layers, int) and isinstance(types, list):
        drafted = config.get("num_nextn_predict_layers")
        if len(types) - layers == drafted != 0:
            config["layer_types"] = types[:layers]
