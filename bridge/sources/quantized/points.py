"""Zero points of compressed-tensors as int8.

Those of packed codes share words of 32 bits along `out`.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np

from bridge.sources.quantized.parts import Array
from bridge.sources.quantized.words import Turned
from bridge.sources.weights.shards import Weights

SUFFIX = ".weight_zero_point"


def unpacked(weights: Weights) -> Weights:
    """The weights with zero points (out, blocks), which the file has as (out / 8, blocks) beside four-bit codes."""
    specs, holder = dict(weights.specs), dict(weights.holder)
    for name, spec in weights.specs.items():
        scale = weights.specs.get(f"{name.removesuffix(SUFFIX)}.weight_scale")
        if not name.endswith(SUFFIX) or spec.dtype != "int32" or scale is None or len(scale.shape) != 2:
            continue
        specs[name] = dataclasses.replace(spec, shape=scale.shape, dtype="int8")
        holder[name] = Turned(weights.holder[name], partial(_read, weights, scale.shape[0]))
    return dataclasses.replace(weights, specs=specs, holder=holder)


def _read(weights: Weights, rows: int, name: str) -> Array:
    from bridge.quant.codec.packing import unpacked_codes

    stored = np.ascontiguousarray(weights.read(name).T)  # blocks, words
    dtype = "int4" if stored.shape[1] * 4 < rows else "int8"
    codes = unpacked_codes(stored, dtype, "int32", rows)
    return np.ascontiguousarray(codes.view(np.int8).T)
