"""Write `genai_config.json`, from which onnxruntime-genai generates with a decoder's graph.

Extents of the cache come from the graph, token ids and sampling from generation_config.json, else from config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bridge.core.text import fold_layers
from bridge.sources.configs.positions import image_positions
from bridge.sources.source import Source
from bridge.targets.config_json import generation_settings
from bridge.targets.onnx.files import DECODER, EMBEDDING, ENCODER, GENAI, MODEL, PARTS, TILE_ROWS, UNKNOWN, VISION
from bridge.targets.onnx.run.runtime import PAST
from bridge.targets.onnx.run.tiles import tiling_entries
from bridge.targets.tasks import listed

# Its generic decoder. Names of model types add work for graphs of its own builder: `phi3` computes the cache of long
# RoPE again where the second table of angles begins, which is a part of our graphs.
_TYPE = "decoder"
_INPUTS = ("input_ids", "attention_mask", "position_ids")
SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
CACHE_INPUTS = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
_OWN_INPUTS = {
    "past_key_names": "past_key_values.%d.decoder.key", "past_value_names": "past_key_values.%d.decoder.value",
}  # fmt: skip
_OWN_OUTPUTS = {"present_key_names": "present.%d.decoder.key", "present_value_names": "present.%d.decoder.value"}
CROSS_INPUTS = {
    "cross_past_key_names": "past_key_values.%d.encoder.key",
    "cross_past_value_names": "past_key_values.%d.encoder.value",
}
CROSS_OUTPUTS = {
    "cross_present_key_names": "present.%d.encoder.key", "cross_present_value_names": "present.%d.encoder.value",
}  # fmt: skip
_MASK = ("encoder_attention_mask",)
_START = "decoder_start_token_id"
_STATES = (".conv_state", ".recurrent_state")  # which it finds by these names
NO_END = 512  # tokens, for models whose positions have no end
CACHE_OUTPUTS = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
_MORE = ("vision_start_token_id", "video_token_id")  # of Qwen-VL, whose places onnxruntime-genai counts from these
_CROSSED = ".encoder.key"  # the ending of keys of cross-attention, which name its layers
_CONV = ".conv_state"
# Our names of inputs, which are those of transformers -> onnxruntime-genai's, where they differ.
_GENAI_NAMES = {"input_features": "audio_embeds", "feature_attention_mask": "attention_mask"}


def write_genai_config(
    source: Source,
    text: Mapping[str, Any],
    directory: Path,
    session: Mapping[str, str] | None = None,
    *,
    shared: bool = False,
) -> str:
    """Write the file beside `model.onnx`; return why onnxruntime-genai cannot run the graph ("" if it was written).

    text: `Graph.text`. session: entries of ONNX Runtime's session. shared: past and present are one buffer.
    """
    inputs = graph_inputs(directory / MODEL)
    caches = {name: shape for name, shape in inputs.items() if name.startswith("past_key_values.")}
    keys = {name: shape for name, shape in caches.items() if name.endswith((".key", ".value"))}
    states = [name for name in caches if name not in keys]
    unknown = [name for name in states if not name.endswith(_STATES)]
    if states and (shared or not keys or unknown):
        kept = ", ".join(fold_layers(unknown or states))
        beside = "beside keys and values" + (" in buffers of one size" if shared else "")
        alone = beside if keys else "alone"
        return f"no {GENAI}: the graph keeps {kept} {alone}, with which onnxruntime-genai was not tried"
    extents = {(shape[1], shape[3]) for shape in keys.values()}
    if len(extents) != 1:
        several = fold_layers([f"{name} {list(shape)}" for name, shape in keys.items()])
        return f"no {GENAI}: onnxruntime-genai takes caches of one shape, and the graph has {', '.join(several)}"
    heads, width = extents.pop()
    context = text.get("max_position_embeddings")
    if not isinstance(context, int):
        return f"no {GENAI}: onnxruntime-genai needs max_position_embeddings, which config.json does not have"
    layers = 1 + max(int(name.split(".")[1]) for name in caches)
    decoder: dict[str, Any] = {
        "filename": MODEL,
        "head_size": width,
        "hidden_size": text["hidden_size"],
        "num_attention_heads": text["num_attention_heads"],
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "inputs": {name: name for name in _INPUTS if name in inputs} | CACHE_INPUTS,
        "outputs": {"logits": "logits"} | CACHE_OUTPUTS,
        **_session(session or {}),
    }
    kind = _TYPE  # which finds recurrent states, and convolution states beside them, by their names
    if states and all(name.endswith(_CONV) for name in states):
        kind = listed("genai", "convolves")[0]
        convolve = {int(name.split(".")[1]) for name in states}
        decoder["layer_types"] = ["conv" if at in convolve else "full_attention" for at in range(layers)]
    settings = generation_settings(source.side_files)
    model = {"type": kind, **token_ids(settings, text), "context_length": context, "vocab_size": text["vocab_size"]}
    _write(directory, {**model, "decoder": decoder}, settings, shared)
    return ""


def write_parts_config(source: Source, text: Mapping[str, Any], directory: Path, session: Mapping[str, str]) -> str:
    """Write what joins the graphs of an encoder and a decoder; return what onnxruntime-genai cannot do with it.

    Its keys are those of onnxruntime-genai, which runs Whisper's graphs.
    """
    feeds, gives = graph_inputs(directory / ENCODER), graph_outputs(directory / ENCODER)
    inputs = graph_inputs(directory / DECODER)
    own = [shape for name, shape in inputs.items() if name.endswith(".decoder.key")]
    cross = [shape for name, shape in inputs.items() if name.endswith(".encoder.key")]
    settings = generation_settings(source.side_files)
    kind = source.config.get("model_type")
    known, mask = kind in listed("genai", "joins"), {name: name for name in _MASK if name in gives}
    size = {"hidden_size": text["hidden_size"], "num_attention_heads": own[0][1], "head_size": own[0][3]}
    encoder = {
        "filename": ENCODER,
        **size,
        "num_hidden_layers": len(cross),
        "num_key_value_heads": cross[0][1],
        "inputs": {"audio_features": "input_features"} if known else {name: name for name in feeds},
        "outputs": {"encoder_hidden_states": "last_hidden_state", **CROSS_OUTPUTS} | mask,
        **_session(session),
    }
    decoder = {
        "filename": DECODER,
        **size,
        "num_hidden_layers": len(own),
        "num_key_value_heads": own[0][1],
        "inputs": {"input_ids": "input_ids"} | {n: n for n in _MASK if n in inputs} | _OWN_INPUTS | CROSS_INPUTS,
        "outputs": {"logits": "logits"} | _OWN_OUTPUTS,
        **_session(session),
    }
    starts = (settings, source.config, source.config.get("decoder") or {})
    start = next((part[_START] for part in starts if part.get(_START) is not None), None)
    positions = text.get("max_position_embeddings") or source.config.get("max_target_positions")
    model = {
        "type": kind if known else UNKNOWN,
        **token_ids(settings, text),
        _START: start if start is not None else text.get("bos_token_id") or 0,
        "context_length": positions if isinstance(positions, int) else NO_END,
        "vocab_size": text["vocab_size"],
        "encoder": encoder,
        "decoder": decoder,
    }
    _write(directory, model, settings)
    return _unread(kind)


def graph_inputs(path: Path) -> dict[str, tuple[int | str | None, ...]]:
    """Input -> its axes."""
    from bridge.targets.onnx.lint.model import axes

    return {value.name: axes(value.type.tensor_type) or () for value in _graph(path).input}


def graph_outputs(path: Path) -> list[str]:
    """Names of the outputs."""
    return [value.name for value in _graph(path).output]


def _graph(path: Path) -> Any:
    import onnx

    return onnx.load(path, load_external_data=False).graph


def token_ids(settings: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Ids that begin, end and fill a text; `eos_token_id` may be a list. The runtime needs one to fill with."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: settings.get(name, text.get(name)) for name in names}
    ends = ids["eos_token_id"]
    if ids["pad_token_id"] is None:
        ids["pad_token_id"] = ends[0] if isinstance(ends, list) and ends else ends
    return {name: value for name, value in ids.items() if value is not None}


def write_multimodal_config(
    source: Source, text: Mapping[str, Any], directory: Path, session: Mapping[str, str]
) -> str:
    """Write what joins graphs that see or hear; return what onnxruntime-genai cannot do with it ("" if it runs them).

    Its keys are those of onnxruntime-genai, which reads it for the model types that it knows; `qbridge run` reads all.
    """
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
    token = "image_token_id" if seen == "vision" else "audio_token_id"
    positions = text.get("max_position_embeddings")
    model = {
        "type": kind,
        **token_ids(settings, text),
        token: text[token],
        **{name: source.config[name] for name in _MORE if name in source.config},
        "context_length": positions if isinstance(positions, int) else NO_END,
        "vocab_size": text["vocab_size"],
        **{name: {**part, **_session(session)} for name, part in parts.items()},
    }
    _write(directory, model, settings)
    return _unread(kind)


def _session(entries: Mapping[str, str]) -> dict[str, Any]:
    return {"session_options": {**entries, "provider_options": []}}


def _write(directory: Path, model: Mapping[str, Any], settings: Mapping[str, Any], shared: bool = False) -> None:
    """Write the entries of the model, and how tokens are searched for."""
    search = {key: settings[key] for key in SEARCH if settings.get(key) is not None}
    search |= {"max_length": model["context_length"], "past_present_share_buffer": shared}
    (directory / GENAI).write_text(json.dumps({"model": model, "search": search}, indent=2) + "\n")


def _unread(kind: object) -> str:
    """Why onnxruntime-genai does not run the joined graphs of a model type; "" if it does."""
    if kind in listed("genai", "joins"):
        return ""
    reader = "`qbridge run` reads the file, and so may your program"
    return f"{GENAI} says how the graphs are joined; onnxruntime-genai runs no {kind} of these graphs: {reader}"


def _decoder(
    source: Source, text: Mapping[str, Any], inputs: Mapping[str, tuple[int | str | None, ...]], crossed: list[int]
) -> dict[str, Any]:
    """The decoder's entry. inputs: of its graph, with their axes.  crossed: layers that attend to what is seen."""
    keys = [shape for name, shape in inputs.items() if name.endswith(".key")]
    named = {name: name for name in inputs if not name.startswith(PAST)}
    layers_that_see = {"cross_attention_layers": crossed, "image_positions": image_positions(source.config)}
    return {
        "filename": DECODER,
        "head_size": keys[0][3],
        "hidden_size": text["hidden_size"],
        "num_attention_heads": text["num_attention_heads"],
        **_layers(inputs),
        "num_key_value_heads": keys[0][1],
        **(layers_that_see if crossed else {}),
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
    if TILE_ROWS in reads:
        tower |= tiling_entries(text, reads["pixel_values"][3])
    return tower


def _layers(inputs: Iterable[str]) -> dict[str, Any]:
    """How many layers keep something of earlier tokens, and their types if some keep states of convolutions."""
    convolves = {int(name.split(".")[1]): name.endswith(_CONV) for name in inputs if name.startswith(PAST)}
    types = ["conv" if convolves[layer] else "full_attention" for layer in sorted(convolves)]
    return {"num_hidden_layers": len(types)} | ({"layer_types": types} if any(convolves.values()) else {})
