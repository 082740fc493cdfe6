"""Choose the calling convention of a model's graph."""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.calls.encoder_decoder import part_call
from bridge.targets.onnx.export.calls.images import image_call, question_call
from bridge.targets.onnx.export.calls.multimodal import multimodal_call
from bridge.targets.onnx.export.calls.pairs import pair_call
from bridge.targets.onnx.export.calls.sound import sound_call
from bridge.targets.onnx.export.calls.text import Call, text_call
from bridge.targets.tasks import Task


def call_of(
    model: Any,
    task: Task,
    mode: Any,
    dtype: torch.dtype,
    *,
    cache: bool,
    part: str,
    image: tuple[int, int] | None,
    pooling: str,
) -> Call:
    """Return the call of `task`, or of its `part`; the other arguments are those of `export_graph`."""
    if part and "encoder" not in task.parts:
        return multimodal_call(model, task, part, mode, dtype, image)
    if part:
        return part_call(model, task, part, mode, dtype, image)
    if "pixel_mask" in task.inputs:
        return question_call(model, task, mode, dtype)
    if task.pairs:
        return pair_call(model, task, mode, dtype, image)
    if model.main_input_name == "pixel_values":
        return image_call(model, task, mode, dtype, image)
    if model.main_input_name in ("input_values", "input_features"):
        return sound_call(model, task, mode, dtype)
    return text_call(model, task, mode, dtype, cache=cache, pooling=pooling)
