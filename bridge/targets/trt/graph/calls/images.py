"""The calls of models that see images, alone or beside texts.

Images have one size, batches any.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.export import Dim

from bridge.targets.trt.graph.calls.text import BATCH, SEQUENCE, Axes, Call, Flat
from bridge.targets.trt.graph.tasks import Task

SIDE = 224  # of images, if nothing gives their size
TEXTS = 5  # rows of text in the example: unlike the number of images
Size = tuple[int, int]


def image_call(model: Any, task: Task, mode: Any, dtype: torch.dtype, image: Size | None) -> Call:
    """Return the call of an image model: `pixel_values` of one size, dynamic batch."""
    size = size_of(model.config, image)
    with mode:
        inputs = pixels_of(model.config, size, dtype)
        feeds: dict[str, Axes] = {"pixel_values": ("batch", *map(int, inputs["pixel_values"].shape[1:]))}
        if "bool_masked_pos" in task.inputs:
            patches = _patches(model.config, size)
            inputs["bool_masked_pos"] = torch.zeros(BATCH, patches, dtype=torch.bool)
            feeds["bool_masked_pos"] = ("batch", patches)
        out = model(**inputs, return_dict=True)
        probe = {n: out[n] for n in task.outputs if out.get(n) is not None}
    gives: dict[str, Axes] = {n: ("batch", *map(int, t.shape[1:])) for n, t in probe.items()}
    shapes = {name: {0: Dim("batch")} for name in inputs}
    return Call(Flat(model, tuple(probe)), (inputs, []), (shapes, []), feeds, gives)


def pair_call(model: Any, task: Task, mode: Any, dtype: torch.dtype, image: Size | None) -> Call:
    """Return the call of two towers: rows of text and images, each with an axis of its own."""
    accepted = inspect.signature(model.forward).parameters
    names = [n for n in task.inputs if n in accepted and n not in ("pixel_values", "token_type_ids")]
    vision = model.config.vision_config
    with mode:
        pixels = pixels_of(vision, size_of(vision, image), dtype)
        inputs = {n: torch.ones(TEXTS, SEQUENCE, dtype=torch.long) for n in names} | pixels
        out = model(**inputs, return_dict=True)
        probe = {n: out[n] for n in task.outputs if out.get(n) is not None}
    rows, images = Dim("text_batch"), Dim("image_batch")
    sequence = Dim("sequence", max=getattr(model.config.text_config, "max_position_embeddings", None))
    shapes = {n: {0: rows, 1: sequence} for n in names} | {"pixel_values": {0: images}}
    feeds: dict[str, Axes] = dict.fromkeys(names, ("text_batch", "sequence"))
    feeds["pixel_values"] = ("image_batch", *map(int, pixels["pixel_values"].shape[1:]))
    own: dict[str, Axes] = {"logits_per_image": ("image_batch", "text_batch")}
    for name in ("text", "image"):
        if f"{name}_embeds" in probe:
            own[f"{name}_embeds"] = (f"{name}_batch", int(probe[f"{name}_embeds"].shape[-1]))
    gives = {n: own[n] for n in probe}
    return Call(Flat(model, tuple(probe)), (inputs, []), (shapes, []), feeds, gives)


def size_of(config: Any, given: Size | None) -> Size:
    own = getattr(config, "image_size", None)
    if isinstance(own, int):
        return own, own
    return (int(own[0]), int(own[1])) if own else given or (SIDE, SIDE)


def pixels_of(config: Any, size: Size, dtype: torch.dtype) -> dict[str, Any]:
    return {"pixel_values": torch.zeros(BATCH, int(getattr(config, "num_channels", 3)), *size, dtype=dtype)}


def _patches(config: Any, size: Size) -> int:
    patch = config.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else patch
    return (size[0] // height) * (size[1] // width)
