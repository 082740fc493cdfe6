"""Write `genai_config.json`, which joins graphs that see or hear.

Its keys are those of onnxruntime-genai, which reads it for the model types that it knows; `qbridge run` reads all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bridge.sources.configs.positions import image_positions
from bridge.sources.source import Source
from bridge.targets.config_json import generation_settings
from bridge.targets.onnx.files import DECODER, EMBEDDING, PARTS, VISION
from bridge.targets.onnx.names import GENAI, ROWS
from bridge.targets.onnx.run.runtime import PAST
from bridge.targets.onnx.run.tiles import tiling_entries
from bridge.targets.onnx.write.genai_config import (
    CACHE_INPUTS,
    CACHE_OUTPUTS,
    CROSS_INPUTS,
    CROSS_OUTPUTS,
    NO_END,
    SEARCH,
    graph_inputs,
    graph_outputs,
    token_ids,
)
from bridge.targets.tasks import listed

_MORE = ("vision_start_token_id", "video_token_id")  # of Qwen-VL, whose places onnxruntime-genai counts from these
_CROSSED = ".encoder.key"  # the ending of keys of cross-attention, which name its layers
_CONV = ".conv_state"
# Our names of inputs, which are those of transformers -> onnxruntime-genai's, where they differ.
_GENAI_NAMES = {"input_features": "audio_embeds", "feature_attention_mask": "attention_mask"}


def write_multimodal_config(
    source: Source, text: Mapping[str, Any], directory: Path, session: Mapping[str, str]
) -> str:
    """Write the file; return what onnxruntime-genai cannot do with it ("" if it runs the model)."""
    inputs = graph_inputs(directory / DECODER)
    crossed = [int(name.split(".")[1]) for name in inputs if name.endswith(_CROSSED)]
    settings, kind = generation_settings(source.side_files), str(source.config.get("model_type"))
    seen = "vision" if (directory / VISION).is_file() else "speech"
    parts = {
        seen: _tower(source, text, directory / PARTS[seen], bool(crossed)),
        "embedding": {
            "filename": EMBEDDING,
            "inputs": {name: name for name in graph_inputs(directory / EMBEDDING)},
            "outputs": {name: name for name in graph_outputs(directory / EMBEDDING)},
        },
        "decoder": _decoder(source, text, inputs, crossed),
    }
    of_session = {"session_options": {**session, "provider_options": []}}
    token = "image_token_id" if seen == "vision" else "audio_token_id"
    positions = text.get("max_position_embeddings")
    model = {
        "type": kind,
        **token_ids(settings, text),
        token: text[token],
        **{name: source.config[name] for name in _MORE if name in source.config},
        "context_length": positions if isinstance(positions, int) else NO_END,
        "vocab_size": text["vocab_size"],
        **{name: {**part, **of_session} for name, part in parts.items()},
    }
    search = {key: settings[key] for key in SEARCH if settings.get(key) is not None}
    search |= {"max_length": model["context_length"], "past_present_share_buffer": False}
    (directory / GENAI).write_text(json.dumps({"model": model, "search": search}, indent=2) + "\n")
    if kind in listed("genai", "joins"):
        return ""
    why = f"onnxruntime-genai runs no {kind} of these graphs: `qbridge run` reads the file, and so may your program"
    return f"{GENAI} says how the graphs are joined; {why}"


def _decoder(
    source: Source, text: Mapping[str, Any], inputs: Mapping[str, tuple[int | str | None, ...]], crossed: list[int]
) -> dict[str, Any]:
    """The decoder's entry. inputs: of its graph, with their axes.  crossed: layers that attend to what is seen."""
    keys = [shape for name, shape in inputs.items() if name.endswith(".key")]
    named = {name: name for name in inputs if not name.startswith(PAST)}
    return {
        "filename": DECODER,
        "head_size": keys[0][3],
        "hidden_size": text["hidden_size"],
        "num_attention_heads": text["num_attention_heads"],
        **_layers(inputs),
        "num_key_value_heads": keys[0][1],
        **(_crossing(source, crossed) if crossed else {}),
        "inputs": named | CACHE_INPUTS | (CROSS_INPUTS if crossed else {}),
        "outputs": {"logits": "logits"} | CACHE_OUTPUTS,
    }


def _tower(source: Source, text: Mapping[str, Any], file: Path, crossed: bool) -> dict[str, Any]:
    """The entry of the graph that sees or hears. crossed: it gives keys and values of cross-attention."""
    reads = graph_inputs(file)
    tower: dict[str, Any] = {
        "filename": file.name,
        "inputs": {_GENAI_NAMES.get(name, name): name for name in reads},
        "outputs": CROSS_OUTPUTS if crossed else {name: name for name in graph_outputs(file)},
    }
    if "image_grid_thw" in reads:
        tower["spatial_merge_size"] = source.config["vision_config"].get("spatial_merge_size", 2)
    if ROWS in reads:
        tower |= tiling_entries(text, reads["pixel_values"][3])
    return tower


def _layers(inputs: Iterable[str]) -> dict[str, Any]:
    """How many layers keep something of earlier tokens, and their types if some keep states of convolutions."""
    convolves = {int(name.split(".")[1]): name.endswith(_CONV) for name in inputs if name.startswith(PAST)}
    types = ["conv" if convolves[layer] else "full_attention" for layer in sorted(convolves)]
    return {"num_hidden_layers": len(types)} | ({"layer_types": types} if any(convolves.values()) else {})


def _crossing(source: Source, layers: list[int]) -> dict[str, Any]:
    """Which layers read images by cross-attention, and how many keys each has of an image."""
    return {"cross_attention_layers": layers, "image_positions": image_positions(source.config)}
