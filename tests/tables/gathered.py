"""What rectangles stand for, in a few lines of NumPy: the oracle of rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bridge.tables.expressions.regions import Array, Block, Blocks


def gathered(blocks: Blocks, tensors: Mapping[str, Array]) -> Array:
    """The rectangles of `tensors` under each other: a vector, or a matrix."""
    return np.concatenate([_rectangle(block, tensors) for block in blocks])


def _rectangle(block: Block, tensors: Mapping[str, Array]) -> Array:
    if not block.source:
        return np.zeros(block.shape, next(iter(tensors.values())).dtype)
    tensor = tensors[block.source]
    if block.cols is None:
        found = tensor.reshape(-1)[slice(*block.rows, block.step)]
    else:
        matrix = tensor.reshape(-1, tensor.shape[-1])
        found = (matrix.T if block.transposed else matrix)[slice(*block.rows, block.step), slice(*block.cols)]
    if block.rope:
        half = abs(block.rope) // 2
        heads = found.reshape(-1, *((2, half) if block.rope > 0 else (half, 2)), *found.shape[1:])
        found = heads.swapaxes(1, 2).reshape(found.shape)
    return found + np.asarray(block.shift, found.dtype) if block.shift else found
