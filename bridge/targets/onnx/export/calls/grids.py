"""Vision towers of Qwen-VL: an image of any size, and its grid.

transformers counts patches and windows in Python. Here the grid is data: positions follow from it, all patches are one
segment, and windows are a mask.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge.core.errors import ExportError

WINDOWS = "bridge_windows"


def grid_rows(model: Any, patches: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The features of the image that has these patches (rows, width); `grid`: [[1, height, width]] in patches.

    Qwen3-VL has more of them, each for one of the decoder's first layers: layers, rows, width.
    """
    tower = model.model.visual
    rows, columns = _places(torch.arange(patches.shape[0]), grid[0, 2], tower.spatial_merge_size)
    states, deep = tower.patch_embed(patches), []
    if hasattr(tower, "downsample"):
        states = tower.embeddings(tower.post_conv_layernorm(states), grid.prod(1), grid, rows, columns)
    elif hasattr(tower, "pos_embed"):
        states = states + _resampled(tower, rows, columns, grid).to(states.dtype)
    rotation = tower.rotary_pos_emb(states, torch.stack([rows, columns], -1))
    full = getattr(tower, "fullatt_block_indexes", None)
    within = None if full is None else _windows(tower, rows, columns)
    kept = tower.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(WINDOWS, _in_windows)
    tower.config._attn_implementation = WINDOWS
    try:
        for number, block in enumerate(tower.blocks):
            mask = {} if full is None or number in full else {"within": within}
            states = block(states, cu_seqlens=_Whole(patches.shape[0]), position_embeddings=rotation, **mask)
            if number in getattr(tower, "deepstack_visual_indexes", ()):
                deep.append(tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(number)](states))
    finally:
        tower.config._attn_implementation = kept
    states = _halved(tower, states) if hasattr(tower, "downsample") else states
    return (tower.merger(states), *([torch.stack(deep)] if deep else []))


def _halved(tower: Any, states: torch.Tensor) -> torch.Tensor:
    """GLM-4V: a convolution makes a row of each square of patches."""
    merge = tower.spatial_merge_size
    squares = tower.post_layernorm(states).unflatten(0, (-1, merge, merge)).permute(0, 3, 1, 2)
    made: torch.Tensor = tower.downsample(squares).flatten(1)
    return made


def _resampled(tower: Any, rows: torch.Tensor, columns: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The learned positions of a square, between which those of the image lie."""
    try:
        from transformers.vision_utils import _interpolation_axis_taps_weights
    except ImportError as error:
        raise ExportError(
            f"{type(tower).__name__}: transformers {transformers.__version__} lacks what its positions need; "
            "pip install 'transformers>=5.15'"
        ) from error
    side, mode = tower.num_grid_per_side, (tower.interpolation_mode, tower.interpolation_align_corners)
    down, heights = _interpolation_axis_taps_weights(rows, grid[0, 1], side, *mode)
    across, widths = _interpolation_axis_taps_weights(columns, grid[0, 2], side, *mode)
    weights = heights[:, :, None] * widths[:, None, :]
    near = tower.pos_embed((down[:, :, None] * side + across[:, None, :]).flatten(1))
    mean: torch.Tensor = (near * weights.flatten(1)[:, :, None]).sum(1)
    return mean


def _places(patch: torch.Tensor, width: torch.Tensor, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each patch: squares of `merge` x `merge` patches become a row, and follow each other."""
    square, blocks = patch // merge**2, width // merge
    row = torch.div(square, blocks, rounding_mode="floor") * merge + patch // merge % merge
    return row, torch.remainder(square, blocks) * merge + patch % merge


def _windows(tower: Any, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """1, 1, patches, patches: True in the same window."""
    side = tower.window_size // tower.patch_size // tower.spatial_merge_size * tower.spatial_merge_size
    down, across = rows // side, columns // side
    same: torch.Tensor = (down[:, None] == down) & (across[:, None] == across)
    return same[None, None]


def _in_windows(
    module: Any, query: Any, key: Any, value: Any, mask: Any = None, within: Any = None, **options: Any
) -> Any:
    del mask  # there is none: the images of a tower are in segments
    options.pop("attention_mask", None)
    return sdpa_attention_forward(module, query, key, value, within, **options)


class _Whole:
    """Bounds of the one segment of all patches, as the towers read them: a difference of bounds as a list."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __getitem__(self, at: slice) -> _Whole:
        return self

    def __sub__(self, other: _Whole) -> _Whole:
        return self

    def tolist(self) -> list[Any]:
        return [self.length]
