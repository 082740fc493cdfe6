"""Convolution over any number of spatial axes, as the engine's: channels first, zeros for padding, no kernel flip."""

from __future__ import annotations

import numpy as np

from tests.oracles.tripy_runtime.memory import Array


def convolution(
    x: Array,  # batch, in, *space
    kernel: Array,  # out, in // groups, *window
    *,
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    groups: int,
    dilation: tuple[int, ...],
) -> Array:
    """The result in x's type, without the bias."""
    axes = tuple(range(2, x.ndim))
    reach = [(extent - 1) * step + 1 for extent, step in zip(kernel.shape[2:], dilation, strict=True)]
    padded = np.pad(x, [(0, 0), (0, 0), *padding])
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axes)  # batch, in, *places, *reach
    taken = windows[(slice(None),) * 2 + tuple(slice(None, None, by) for by in (*stride, *dilation))]
    parts = []
    for channels, rows in zip(np.split(taken, groups, 1), np.split(kernel, groups, 0), strict=True):
        places = tuple(range(2 + len(axes), 2 + 2 * len(axes)))
        product = np.tensordot(channels, rows, ((1, *places), (1, *axes)))  # batch, *places, out // groups
        parts.append(np.moveaxis(product, -1, 1))
    return np.concatenate(parts, 1)
