"""Mistral 3, which reads one image of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim

from bridge.targets.onnx.export.calls.multimodal import Vision, width_of
from bridge.targets.onnx.export.calls.text import Axes, Call
from bridge.targets.onnx.export.calls.towers import selected_layers
from bridge.targets.onnx.export.family import Family


def _features(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Mistral 3: the one image may have any size."""
    size, layer = (pixel_values.shape[2], pixel_values.shape[3]), model.config.vision_feature_layer
    made = model.model.vision_tower(pixel_values, image_sizes=[size], output_hidden_states=True, return_dict=True)
    features: torch.Tensor = model.model.multi_modal_projector(selected_layers(made, layer).squeeze(0), [size])
    return features


def _vision(model: Any, mode: Any, dtype: torch.dtype) -> Call:
    """One image of any size in units of what becomes a row."""
    vision = model.config.vision_config
    unit = vision.patch_size * model.config.spatial_merge_size
    with mode:
        inputs = {"pixel_values": torch.zeros(1, vision.num_channels, 3 * unit, 4 * unit, dtype=dtype)}
    shapes = {"pixel_values": {2: unit * Dim("row_units", min=2), 3: unit * Dim("column_units", min=2)}}
    feeds: dict[str, Axes] = {"pixel_values": (1, vision.num_channels, "image_height", "image_width")}
    return Call(Vision(model), (inputs,), (shapes,), feeds, {"image_features": ("image_rows", width_of(model))})


FAMILY = Family(features=_features, vision=_vision)
