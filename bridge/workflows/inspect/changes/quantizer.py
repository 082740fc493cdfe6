"""Quantize and dequantize a torch tensor with the encoder of conversions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bridge.core.dtypes import to_float32
from bridge.quant.codec.arrays import Array
from bridge.workflows.inspect.collect import storage
from bridge.workflows.inspect.statistics.coding import fake_quantized
from bridge.workflows.inspect.statistics.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Quantizer:
    """What the codes of a matrix (rows, in) stand for, in its own dtype.

    `amax`: static; None takes that of the format, or of each tensor. `scale` (in,): the factor of the tensor before it
    is quantized, by which the values are divided.
    """

    how: Quantization
    amax: float | None = None
    scale: Array | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.scale is None:
            return as_tensor(fake_quantized(*storage(tensor), self.how, self.amax), tensor)
        scaled = np.ascontiguousarray(to_float32(*storage(tensor)) * self.scale)
        return as_tensor(fake_quantized(scaled, "float32", self.how, self.amax) / self.scale, tensor)


def as_tensor(values: Array, like: Tensor) -> Tensor:
    """Float32 values as a tensor of another's dtype, where that one lies."""
    import torch

    return torch.from_numpy(values).to(like.device, like.dtype)
