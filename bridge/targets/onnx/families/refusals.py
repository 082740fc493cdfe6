"""Why checkpoints of some families have no graphs, as their configs tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def why_refused(config: Mapping[str, Any]) -> str:
    """Why a checkpoint with this config.json has no graphs, though others of its class have; "" if it has."""
    kind = config.get("model_type")
    if kind == "funnel":
        return "its positions are Python lists of one text's length, and it pools no text of two tokens; use target hf"
    if kind in ("blip-2", "instructblip"):
        text = (config.get("text_config") or {}).get("model_type")
        if text in ("t5", "flan-t5"):
            return "its text model has an encoder of its own (T5); use a checkpoint with OPT or Vicuna, or target hf"
        if not isinstance(config.get("image_token_index"), int):
            return (
                "config.json does not say which token stands for an image; set image_token_index to the id of <image> "
                "in its tokenizer, as newer revisions of the checkpoint do"
            )
    if kind == "ovis2" and (config.get("vision_config") or {}).get("tokenize_function") == "gumbel_argmax":
        return "its tower draws random numbers (tokenize_function gumbel_argmax); use target hf"
    if kind == "vilt" and config.get("max_image_length", -1) > 0:
        return "it draws max_image_length of an image's patches; set that to -1 to read all of them, or use target hf"
    return ""
