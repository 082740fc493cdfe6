"""Quantize the weights of a block in place, by rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bridge.calibration.quantizers import QuantizerBinding

PIECE = 4 << 20  # elements; ModelOpt's FP8 takes some 12 bytes an element: 2.8 GB for a matrix of Llama 70B at once


def fold_weights(root: Any, bindings: Iterable[QuantizerBinding]) -> None:
    """Replace weights by what ModelOpt's quantizers make of them, and switch these off: the model computes the same.

    Only where every row is quantized by itself (one amax for all, or one for each row); a quantizer of blocks stays on.
    """
    for binding in bindings:
        module = root.get_submodule(binding.module)
        weight: Any = module._parameters.get("weight")
        quantizer: Any = getattr(module, "weight_quantizer", None)
        amax: Any = getattr(quantizer, "_amax", None)
        if weight is None or amax is None or quantizer.block_sizes or not quantizer.is_enabled:
            continue
        each = amax.numel() > 1
        if each and tuple(amax.shape) != (weight.shape[0], *(1,) * (weight.ndim - 1)):
            continue
        step = max(1, PIECE * weight.shape[0] // max(1, weight.numel()))
        for begin in range(0, weight.shape[0], step):
            if each:
                quantizer._buffers["_amax"] = amax[begin : begin + step]
            rows = weight.data[begin : begin + step]
            rows.copy_(quantizer(rows))
        quantizer._buffers["_amax"] = amax
        quantizer.disable()
