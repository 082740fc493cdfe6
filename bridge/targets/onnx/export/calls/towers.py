"""Rows of features that towers and projectors make of images or sound.

They are as wide as the decoder. transformers counts the rows of each image while it runs, which would fix the number of
images in a graph: where it does, the tower and the projector are called here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import create_bidirectional_mask

from bridge.targets.onnx.export.family import family_of
from bridge.targets.onnx.export.this_thread import for_this_thread

MASK = "feature_attention_mask"


def image_rows(model: Any, pixel_values: torch.Tensor, **beside: torch.Tensor) -> torch.Tensor:
    """Rows, width: the features of images in the order of their tokens. `beside`: what else the tower reads."""
    make: Callable[..., torch.Tensor] = family_of(model.config).features or _features
    features = make(model, pixel_values, **beside)
    return features.reshape(-1, features.shape[-1])


def _features(model: Any, pixel_values: torch.Tensor, **beside: torch.Tensor) -> torch.Tensor:
    seer = model if hasattr(model, "get_image_features") else model.model  # Janus
    with _whole(model):
        features: torch.Tensor = seer.get_image_features(pixel_values, **beside, return_dict=True).pooler_output
    return features


@contextmanager
def _whole(model: Any) -> Iterator[None]:
    """Let `list(tensor)` be the tensor in the module of `model`: LLaVA lists the features of each image, at the end.

    Other threads see no difference.
    """
    scope = vars(sys.modules[type(model).__module__])
    scope["list"] = for_this_thread(lambda values: values if isinstance(values, torch.Tensor) else list(values), list)
    try:
        yield
    finally:
        del scope["list"]


def selected_layers(made: Any, layer: int | list[int]) -> torch.Tensor:
    """What the layers of a tower made that a config chooses, beside each other."""
    return torch.cat([made.hidden_states[at] for at in ([layer] if isinstance(layer, int) else layer)], -1)


def tile_rows(model: Any, pixel_values: torch.Tensor, rows: torch.Tensor, weights: Any = None) -> torch.Tensor:
    """Rows, width: sums of features of one image's tiles, and of a new line, which is the last of them.

    `rows`: which are added; `weights`: how much of each, all of the one if None.
    """
    config = model.config
    made = model.model.vision_tower(pixel_values, output_hidden_states=True, return_dict=True)
    states = selected_layers(made, config.vision_feature_layer)
    states = states[:, 1:] if config.vision_feature_select_strategy == "default" else states
    features = model.model.multi_modal_projector(states).flatten(0, 1)
    features = torch.cat([features, model.model.image_newline[None]])
    parts = [features[rows[:, at]] for at in range(rows.shape[1])]
    if weights is None:
        return parts[0]
    return torch.stack([part * weights[:, at, None] for at, part in enumerate(parts)]).sum(0)


def patch_rows(model: Any, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Rows, width: the features of the one image that has these patches (1, patches, width); LFM2-VL.

    `grid`: [[height, width]] in patches. Squares of patches become a row; transformers cuts them out of an image, of
    which a graph has one shape. Here all squares stand beside each other, as an image that is one square high.
    """
    mask = torch.ones(patches.shape[:2], dtype=torch.long)
    made = model.model.vision_tower(
        pixel_values=patches, spatial_shapes=grid, pixel_attention_mask=mask, return_dict=True
    )
    projector, width = model.model.multi_modal_projector, grid[0, 1]
    side = projector.factor
    square, inner = torch.arange(patches.shape[1] // side**2), torch.arange(side)
    top = torch.div(square, width // side, rounding_mode="floor") * side
    left = torch.remainder(square, width // side) * side
    place = (top[:, None] + inner[:, None, None]) * width + left[:, None] + inner  # side, squares, side
    features: torch.Tensor = projector(made.last_hidden_state[:, place].flatten(2, 3))
    return features.flatten(0, 2)


def sound_rows(model: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Sounds, rows, width: the features of sound, and how many rows of each sound are its own."""
    if MASK not in inputs:
        rows = model.get_audio_features(inputs["input_features"], return_dict=True).pooler_output
        return (rows.unflatten(0, (inputs["input_features"].shape[0], -1)),)
    tower, features = model.model.audio_tower, inputs["input_features"]
    frames, lengths = tower._get_feat_extract_output_lengths(inputs[MASK].sum(-1))
    most = (features.shape[-1] - 2) // 2 + 1
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=features.new_zeros(features.shape[0], most, 1),
        attention_mask=(torch.arange(most) < frames[:, None]).long(),
    )
    return model.model.multi_modal_projector(tower(features, attention_mask=mask).last_hidden_state), lengths
