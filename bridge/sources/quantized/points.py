"""Zero points of compressed-tensors as int8.

Those of packed codes share words of 32 bits along `out`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np

from bridge.sources.quantized.parts import Array
from bridge.sources.quantized.words import Turned
from bridge.sources.weights.shards import Weights

SUFFIX = ".weight_zero_point"


def unpacked(weights: Weights, dtype_of: Callable[[str], str]) -> Weights:
    """The weights with zero points (out, blocks), which the file has in words along `out` beside packed codes.

    dtype_of: a module -> that of its codes.
    """
    specs, holder = dict(weights.specs), dict(weights.holder)
    for name, spec in weights.specs.items():
        module = name.removesuffix(SUFFIX)
        scale = weights.specs.get(f"{module}.weight_scale")
        if not name.endswith(SUFFIX) or spec.dtype != "int32" or scale is None or len(scale.shape) != 2:
            continue
        specs[name] = dataclasses.replace(spec, shape=scale.shape, dtype="int8")
        holder[name] = Turned(weights.holder[name], partial(_read, weights, scale.shape[0], dtype_of(module)))
    return dataclasses.replace(weights, specs=specs, holder=holder)


def _read(weights: Weights, rows: int, dtype: str, name: str) -> Array:
    from bridge.quant.codec.packing import unpacked_codes

    stored = np.ascontiguousarray(weights.read(name).T)  # blocks, words
    codes = unpacked_codes(stored, dtype, "int32", rows)
    return np.ascontiguousarray(codes.view(np.int8).T)
