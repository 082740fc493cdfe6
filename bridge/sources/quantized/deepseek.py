"""FP8 with `quant_method` "fp8": blocks with `weight_scale_inv` as DeepSeek publishes them, or one scale per tensor.

`weight_scale_inv` is what codes are multiplied by, whatever its name says. Activations are quantized by the runtime,
per token in groups of 128, without anything stored for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.sources.stored import Told, words
from bridge.values import Format, Numeric, TensorSpec

TENSOR = Numeric("float8_e4m3fn", "tensor")


@dataclass(frozen=True)
class Blocks:
    """See `bridge.sources.stored.Reader`."""

    block: tuple[int, int] | None
    companions: tuple[str, ...] = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
    kv: Numeric | None = TENSOR

    def told(self, module: str, tensors: Mapping[str, TensorSpec]) -> Told | str:
        entry = "activation_scale" if "activation_scale" in tensors else "input_scale"
        inverse = "weight_scale_inv" in tensors or "weight_scale" not in tensors
        names = {"codes": "weight", "scale": "weight_scale_inv" if inverse else "weight_scale", "input_scale": entry}
        scale = tensors.get(names["scale"])
        static = TENSOR if entry in tensors else None
        if self.block is None or (scale is not None and scale.size == 1 and static):
            return Told(Format((TENSOR,), static), names)
        kind = "float8_e8m0fnu" if scale is not None and scale.dtype == "float8_e8m0fnu" else "float32"
        return Told(Format((Numeric("float8_e4m3fn", "block", self.block, kind),)), names)


def reader(section: Mapping[str, Any]) -> Blocks:
    """Take `quantization_config`."""
    said = section.get("weight_block_size")
    if said is None:
        return Blocks(None)
    sizes = words.block(said, "quantization_config: weight_block_size")
    return Blocks((sizes[0], sizes[-1]))
