"""The calls of models that see images, alone or beside texts.

Images have one size, or come as patches, any number of them; batches are of any size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim

from bridge.sources.live_models.flat_patches import GRIDS, example_patches, reads_patches
from bridge.targets.onnx.export.calls.text import BATCH, SEQUENCE, Axes, Call, Flat, dynamic_axes
from bridge.targets.tasks import Task

SIDE = 224  # of images, if nothing gives their size
PATCHES = 13  # of an image of the example that comes as patches
Size = tuple[int, int]


def image_call(model: Any, task: Task, mode: Any, dtype: torch.dtype, image: Size | None) -> Call:
    """Return the call of an image model: `pixel_values` of one size, or patches; dynamic batch."""
    size = size_of(model.config, image)
    _forget_biases(model)
    with mode:
        inputs, feeds = images_of(model, model.config, size, dtype, "batch")
        patches = _patches(model.config, size) if len(task.inputs) > 1 else 0
        if "bool_masked_pos" in task.inputs:
            inputs["bool_masked_pos"] = torch.zeros(BATCH, patches, dtype=torch.bool)
            feeds["bool_masked_pos"] = ("batch", patches)
        if "noise" in task.inputs:
            inputs["noise"], feeds["noise"] = torch.zeros(BATCH, patches, dtype=dtype), ("batch", patches)
        out = model(**inputs, return_dict=True)
        probe = {n: out[n] for n in task.outputs if out.get(n) is not None}
    gives: dict[str, Axes] = {n: ("batch", *map(int, t.shape[1:])) for n, t in probe.items()}
    if reads_patches(model) and "last_hidden_state" in gives:
        gives["last_hidden_state"] = ("batch", "patches", gives["last_hidden_state"][2])
    return Call(Flat(model, tuple(probe)), (inputs, []), (dynamic_axes(feeds, {}), []), feeds, gives)


def question_call(model: Any, task: Task, mode: Any, dtype: torch.dtype) -> Call:
    """Return the call of a model that reads a text and an image in each row; images are whole patches of any number."""
    config, (height, width) = model.config, _pair(model.config.patch_size)
    extents = (3 * height, 4 * width)
    names = [name for name in task.inputs if not name.startswith("pixel")]
    with mode:
        inputs = {name: torch.ones(BATCH, SEQUENCE, dtype=torch.long) for name in names}
        inputs["pixel_values"] = torch.zeros(BATCH, config.num_channels, *extents, dtype=dtype)
        inputs["pixel_mask"] = torch.ones(BATCH, *extents, dtype=torch.long)
        logits = model(**inputs, return_dict=True).logits
    batch, tokens = Dim("batch"), Dim("sequence", max=config.max_position_embeddings)
    rows, columns = height * Dim("row_units", min=2), width * Dim("column_units", min=2)
    shapes: dict[str, Any] = {name: {0: batch, 1: tokens} for name in names}
    shapes |= {"pixel_values": {0: batch, 2: rows, 3: columns}, "pixel_mask": {0: batch, 1: rows, 2: columns}}
    feeds: dict[str, Axes] = dict.fromkeys(names, ("batch", "sequence"))
    feeds["pixel_values"] = ("batch", config.num_channels, "image_height", "image_width")
    feeds["pixel_mask"] = ("batch", "image_height", "image_width")
    return Call(
        Flat(model, ("logits",)), (inputs, []), (shapes, []), feeds, {"logits": ("batch", int(logits.shape[1]))}
    )


def images_of(
    model: Any, vision: Any, size: Size, dtype: torch.dtype, rows: str
) -> tuple[dict[str, Any], dict[str, Axes]]:
    """Example inputs of a tower and their axes; `vision`: its config. `rows`: the name of the axis of images."""
    if not reads_patches(model):
        pixels = pixels_of(vision, size, dtype)
        return pixels, {"pixel_values": (rows, *map(int, pixels["pixel_values"].shape[1:]))}
    inputs = example_patches(model, BATCH, PATCHES, dtype)
    width = int(inputs["pixel_values"].shape[-1])
    mask: Axes = (rows, "patches")
    return inputs, {"pixel_values": (*mask, width), "pixel_attention_mask": mask, GRIDS: (rows, 2)}


class _Forgetful(dict[str, Any]):
    """Has no key, whatever was put into it."""

    def __contains__(self, key: object) -> bool:
        return False


def _forget_biases(model: Any) -> None:
    """Let LeViT compute the biases of attention in each run: a trace would read those of the run before as data."""
    for module in model.modules():
        if hasattr(module, "attention_bias_cache"):
            module.attention_bias_cache = _Forgetful()


def size_of(config: Any, given: Size | None) -> Size:
    own = getattr(config, "image_size", None)
    if isinstance(own, int):
        return own, own
    return (int(own[0]), int(own[1])) if own else given or (SIDE, SIDE)


def pixels_of(config: Any, size: Size, dtype: torch.dtype) -> dict[str, Any]:
    return {"pixel_values": torch.zeros(BATCH, int(getattr(config, "num_channels", 3)), *size, dtype=dtype)}


def _patches(config: Any, size: Size) -> int:
    height, width = _pair(config.patch_size)
    return (size[0] // height) * (size[1] // width)


def _pair(extent: Any) -> tuple[int, int]:
    height, width = (extent, extent) if isinstance(extent, int) else extent
    return int(height), int(width)
