"""Towers that read an image as flattened patches and its grid.

SigLIP 2 and LFM2-VL pad a batch of images to one number of patches (NaFlex). transformers resizes the table of
positions to each grid in a loop of Python; here the grid is data, as torch's export needs it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

GRIDS = "spatial_shapes"  # height and width of each image, in patches


def reads_patches(model: Any) -> bool:
    """Whether `model` takes flattened patches."""
    return GRIDS in inspect.signature(model.forward).parameters


def example_patches(model: Any, images: int, patches: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs of `images` images, each of one row of patches."""
    vision = getattr(model.config, "vision_config", model.config)
    pixels = torch.zeros(images, patches, vision.num_channels * vision.patch_size**2, dtype=dtype)
    mask = torch.ones(images, patches, dtype=torch.long)
    return {"pixel_values": pixels, "pixel_attention_mask": mask, GRIDS: torch.tensor([[1, patches]] * images)}


def resize_by_grid(model: Any) -> None:
    """Let the towers in `model` resize their positions without reading a grid's numbers, in place."""
    for module in model.modules():
        if hasattr(module, "resize_positional_embeddings"):
            module.resize_positional_embeddings = _resized


def _resized(positional_embeddings: Any, spatial_shapes: Any, max_length: int) -> Any:
    """What transformers' function of these arguments returns: images, max_length, features.

    The table is side, side, features. Patches behind an image's last have the position of its first.
    """
    height, width = spatial_shapes[:, :1], spatial_shapes[:, 1:]  # images, 1
    patch = torch.arange(max_length)[None]
    patch = torch.where(patch < height * width, patch, torch.zeros_like(patch))  # images, max_length
    side = positional_embeddings.shape[0]
    rows = _shares(torch.div(patch, width, rounding_mode="floor"), height, side)
    columns = _shares(torch.remainder(patch, width), width, side)
    shares = (rows[..., :, None] * columns[..., None, :]).flatten(2)  # images, max_length, side * side
    return (shares @ positional_embeddings.float().flatten(0, 1)).to(positional_embeddings.dtype)


def _shares(place: Any, extent: Any, side: int) -> Any:
    """Images, patches, side: how much of each of `side` entries goes into the place of a patch on an axis.

    As torch interpolates linearly with `antialias`: a larger step than one entry widens the triangle.
    """
    step = side / extent.float()  # images, 1
    away = torch.arange(side) + 0.5 - ((place + 0.5) * step)[..., None]
    share = (1 - away.abs() / step.clamp(min=1)[..., None]).clamp(min=0)
    return share / share.sum(-1, keepdim=True)
