"""FP8 of `quant_method` "fp8": DeepSeek's blocks, or one scale per tensor.

Codes are multiplied by `weight_scale_inv`, despite its name; `scale_fmt` "ue8m0" says that scales are powers of two, in
float32 or as float8_e8m0fnu, and that the runtime rounds those of activations so. It quantizes activations per token in
groups of 128; nothing is stored for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.core.text import described
from bridge.core.values import Format, Numeric, TensorSpec
from bridge.sources.quantized import fields as words
from bridge.sources.quantized.parts import StorageLayout

E4M3 = "e4m3"
TENSOR = Numeric("float8_e4m3fn", "tensor")


@dataclass(frozen=True)
class Blocks:
    """The `Reader` of FP8 blocks."""

    block: tuple[int, int] | None
    form: str = E4M3
    companions: tuple[str, ...] = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
    kv: Numeric | None = TENSOR

    def layout(self, module: str, tensors: Mapping[str, TensorSpec]) -> StorageLayout | str:
        if self.form not in (E4M3, TENSOR.dtype) and "weight" in tensors:
            return (
                f"quantization_config: fmt is {self.form!r}, and its codes are {tensors['weight'].dtype}; codes "
                f"of {E4M3} are read; correct fmt if it is wrong, else start from the unquantized checkpoint"
            )
        entry = "activation_scale" if "activation_scale" in tensors else "input_scale"
        inverse = "weight_scale_inv" in tensors or "weight_scale" not in tensors
        names = {"codes": "weight", "scale": "weight_scale_inv" if inverse else "weight_scale", "input_scale": entry}
        scale = tensors.get(names["scale"])
        static = TENSOR if entry in tensors else None
        if self.block is None or (scale is not None and scale.size == 1 and static):
            return StorageLayout(Format((TENSOR,), static), names)
        return StorageLayout(Format((Numeric("float8_e4m3fn", "block", self.block),)), names)


def reader(section: Mapping[str, Any]) -> Blocks:
    """Read `quantization_config`."""
    size, form = section.get("weight_block_size"), described(section.get("fmt") or E4M3).strip("'")
    if size is None:
        return Blocks(None, form)
    sizes = words.block(size, "quantization_config: weight_block_size")
    return Blocks((sizes[0], sizes[-1]), form)
