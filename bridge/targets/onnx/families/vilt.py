"""Images of several sizes in a batch: ViLT.

transformers resizes the table of positions to each image in a loop of Python, and draws an order of its patches, of
which the answer depends on none. Here the sizes are data, the patches keep their order, and a mask hides the padding.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from bridge.targets.onnx.export.family import Family


def _visual_embed(self: Any, pixel_values: Any, pixel_mask: Any, max_image_length: int = -1) -> Any:
    """Embeddings (batch, 1 + patches, features), which are real, and nothing in place of the patches' places."""
    del max_image_length  # more patches would be drawn; such configs are refused
    patches = self.patch_embeddings(pixel_values)  # batch, features, rows, columns
    batch, _, rows, columns = patches.shape
    real = pixel_mask.reshape(batch, rows, -1, columns, pixel_values.shape[3] // columns)[:, :, 0, :, 0]
    heights, widths = real[:, :, :1].sum(1), real[:, 0].sum(1, keepdim=True)  # batch, 1
    first, table = self.position_embeddings[:, :1], self.position_embeddings[0, 1:]
    side = math.isqrt(table.shape[0])
    down, across = _shares(torch.arange(rows), heights, side), _shares(torch.arange(columns), widths, side)
    shares = down[:, :, None, :, None] * across[:, None, :, None, :]  # batch, rows, columns, side, side
    places = shares.flatten(3).flatten(1, 2).to(table.dtype) @ table
    begin = (self.cls_token + first).expand(batch, -1, -1)
    states = torch.cat([begin, patches.flatten(2).transpose(1, 2) + places], 1)
    return states, torch.cat([torch.ones_like(heights), real.flatten(1)], 1), None


def _shares(place: Any, extent: Any, side: int) -> Any:
    """Batch, places, side: how much of each of `side` entries goes into a place, of so many from end to end."""
    at = place * ((side - 1) / (extent - 1).clamp(min=1).float())  # batch, places
    share: torch.Tensor = (1 - (torch.arange(side) - at[..., None]).abs()).clamp(min=0)
    return share


FAMILY = Family(methods={"ViltEmbeddings": {"visual_embed": _visual_embed}})
