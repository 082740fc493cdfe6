"""Write `genai_config.json`, from which onnxruntime-genai generates with a decoder's graph.

Extents of the cache come from the graph, token ids and sampling from generation_config.json, else from config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.text import fold_layers
from bridge.sources.source import Source
from bridge.targets.config_json import generation_settings
from bridge.targets.trt.writer import MODEL

GENAI = "genai_config.json"
# Its generic decoder. Names of model types add work for graphs of its own builder: `phi3` computes the cache of long
# RoPE again where the second table of angles begins, which is a part of our graphs.
_TYPE = "decoder"
_INPUTS = ("input_ids", "attention_mask", "position_ids")
_SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_CACHE_INPUTS = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
_CACHE_OUTPUTS = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}


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
    inputs = _inputs(directory / MODEL)
    caches = {name: shape for name, shape in inputs.items() if name.startswith("past_key_values.")}
    extents = {(shape[1], shape[3]) for shape in caches.values()}
    if len(extents) != 1:
        several = fold_layers([f"{name} {list(shape)}" for name, shape in caches.items()])
        return f"no {GENAI}: onnxruntime-genai takes caches of one shape, and the graph has {', '.join(several)}"
    heads, width = extents.pop()
    context = text.get("max_position_embeddings")
    if not isinstance(context, int):
        return f"no {GENAI}: onnxruntime-genai needs max_position_embeddings, which config.json does not have"
    decoder = {
        "filename": MODEL,
        "head_size": width,
        "hidden_size": text["hidden_size"],
        "num_attention_heads": text["num_attention_heads"],
        "num_hidden_layers": len(caches) // 2,
        "num_key_value_heads": heads,
        "inputs": {name: name for name in _INPUTS if name in inputs} | _CACHE_INPUTS,
        "outputs": {"logits": "logits"} | _CACHE_OUTPUTS,
        "session_options": {**(session or {}), "provider_options": []},
    }
    settings = generation_settings(source.side_files)
    model = {"type": _TYPE, **_token_ids(settings, text), "context_length": context, "vocab_size": text["vocab_size"]}
    search = {key: settings[key] for key in _SEARCH if settings.get(key) is not None}
    search |= {"max_length": context, "past_present_share_buffer": shared}
    content = {"model": {**model, "decoder": decoder}, "search": search}
    (directory / GENAI).write_text(json.dumps(content, indent=2) + "\n")
    return ""


def _inputs(path: Path) -> dict[str, tuple[int | str | None, ...]]:
    """Input -> its axes."""
    import onnx

    from bridge.targets.trt.lint.model import axes

    graph = onnx.load(path, load_external_data=False).graph
    return {value.name: axes(value.type.tensor_type) or () for value in graph.input}


def _token_ids(settings: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Ids that begin, end and fill a text; `eos_token_id` may be a list. The runtime needs one to fill with."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: settings.get(name, text.get(name)) for name in names}
    ends = ids["eos_token_id"]
    if ids["pad_token_id"] is None:
        ids["pad_token_id"] = ends[0] if isinstance(ends, list) and ends else ends
    return {name: value for name, value in ids.items() if value is not None}
