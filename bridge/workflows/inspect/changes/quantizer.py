"""Quantize and dequantize a torch tensor with the encoder of conversions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bridge.quant.codec.arrays import Array
from bridge.sources.memory import bits_of
from bridge.workflows.inspect.coding import fake_quantized
from bridge.workflows.inspect.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("float32", "float16", "bfloat16")  # dtypes that are quantized as they are; others as float32


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
        import torch

        own = str(tensor.dtype).removeprefix("torch.")
        dtype = own if own in FLOATS and self.scale is None else "float32"
        bits = bits_of(tensor.detach() if dtype == own else tensor.detach().float(), dtype)
        if self.scale is None:
            values = fake_quantized(bits, dtype, self.how, self.amax)
        else:
            values = fake_quantized(np.ascontiguousarray(bits * self.scale), dtype, self.how, self.amax) / self.scale
        return torch.from_numpy(values).to(tensor.device, tensor.dtype)
