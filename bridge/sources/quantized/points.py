"""Zero points of compressed-tensors as int8.

Those of packed codes share words of 32 bits along `out`.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np

from bridge.core.values import NARROW
from bridge.sources.quantized.parts import Array
from bridge.sources.quantized.words import Turned
from bridge.sources.weights.shards import Weights

SUFFIX = ".weight_zero_point"


def unpacked(weights: Weights) -> Weights:
    """The weights with zero points (out, blocks), which the file has in words along `out` beside packed codes."""
    specs, holder = dict(weights.specs), dict(weights.holder)
    for name, spec in weights.specs.items():
        scale = weights.specs.get(f"{name.removesuffix(SUFFIX)}.weight_scale")
        if not name.endswith(SUFFIX) or spec.dtype != "int32" or scale is None or len(scale.shape) != 2:
            continue
        specs[name] = dataclasses.replace(spec, shape=scale.shape, dtype="int8")
        holder[name] = Turned(weights.holder[name], partial(_read, weights, scale.shape[0]))
    return dataclasses.replace(weights, specs=specs, holder=holder)


def _read(weights: Weights, rows: int, name: str) -> Array:
    from bridge.quant.codec.blocks import in_words
    from bridge.quant.codec.packing import unpacked_codes

    stored = np.ascontiguousarray(weights.read(name).T)  # blocks, words
    dtype = next((one for one in ("int4", *NARROW) if in_words(rows, one) == stored.shape[1]), "int8")
    codes = unpacked_codes(stored, dtype, "int32", rows)
    return np.ascontiguousarray(codes.view(np.int8).T)
