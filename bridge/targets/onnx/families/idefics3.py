"""Idefics3, whose images come as tiles."""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.family import Family


def features(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Idefics3, without the images of zeros that fill up a batch, which never reach a graph."""
    states = model.model.vision_model(pixel_values, return_dict=True).last_hidden_state
    features: torch.Tensor = model.model.connector(states)
    return features


FAMILY = Family(features=features)
