"""ModelOpt's unified checkpoints: `quant_algo` of hf_quant_config.json or of quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.core.text import nearest
from bridge.core.values import Format, Numeric, TensorSpec
from bridge.sources.quantized import fields as words
from bridge.sources.quantized.parts import StorageLayout, Unread

_E4M3 = Numeric("float8_e4m3fn", "tensor")
_INT8 = Numeric("int8", "channel")
_NVFP4 = Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn")
_NVFP4_IN_FP8 = Numeric("float4_e2m1fn", "block", (32,), "float8_e4m3fn")
_NVFP4_INPUT = Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn", dynamic=True)
_MXFP8 = Numeric("float8_e4m3fn", "block", (32,), "float8_e8m0fnu")
_MXFP8_INPUT = Numeric("float8_e4m3fn", "block", (32,), "float8_e8m0fnu", dynamic=True)
_TOKEN = Numeric("float8_e4m3fn", "token", dynamic=True)

# quant_algo -> weight, input. INT4's block of 128 is replaced by group_size.
ALGORITHMS: dict[str, tuple[tuple[Numeric, ...], Numeric | None]] = {
    "FP8": ((_E4M3,), _E4M3),
    "FP8_PER_CHANNEL_PER_TOKEN": ((Numeric("float8_e4m3fn", "channel"),), _TOKEN),
    "FP8_PB_WO": ((Numeric("float8_e4m3fn", "block", (128, 128)),), None),  # sic: written in lower case
    "W8A8_SQ_PER_CHANNEL": ((_INT8,), Numeric("int8", "tensor")),
    "W8A16": ((_INT8,), None),
    "W4A16_AWQ": ((Numeric("int4", "block", (128,)),), None),
    "W4A8_AWQ": ((Numeric("int4", "block", (128,)), _E4M3), _E4M3),
    "NVFP4": ((_NVFP4,), _NVFP4_INPUT),
    "NVFP4_AWQ": ((_NVFP4,), _NVFP4_INPUT),
    "W4A16_NVFP4": ((_NVFP4,), None),
    "W4A8_NVFP4_FP8": ((_NVFP4_IN_FP8,), _E4M3),
    "W4A16_MXFP4": ((Numeric("float4_e2m1fn", "block", (32,), "float8_e8m0fnu"),), None),
    "MXFP8": ((_MXFP8,), _MXFP8_INPUT),
}
KV = {"FP8": _E4M3, "INT8": Numeric("int8", "tensor"), "NVFP4": _NVFP4_INPUT}
SUFFIXES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
NAMES = {"codes": "weight", **dict(zip(("scale", "scale_2", "input_scale", "pre_quant_scale"), SUFFIXES, strict=True))}


@dataclass(frozen=True)
class ModelOpt:
    """The `Reader` of a unified checkpoint. `layers`: module -> its own settings in a mixed checkpoint."""

    settings: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    companions: tuple[str, ...] = SUFFIXES

    @property
    def kv(self) -> Numeric | None:
        return KV.get(str(self.settings.get("kv_cache_quant_algo")).upper())

    def layout(self, module: str, tensors: Mapping[str, TensorSpec]) -> StorageLayout | str:
        parts = module.split(".")
        outer = (".".join(parts[:end]) for end in range(len(parts), 0, -1))  # experts are named by their container
        own = next((self.layers[name] for name in outer if name in self.layers), {})
        settings = {**self.settings, **words.mapping(own, f"quantized_layers: {module[:200]}")}
        name = str(settings.get("quant_algo"))
        if name.upper() not in ALGORITHMS:
            return Unread(f"quant_algo {name!r} is unknown; {nearest(name.upper(), ALGORITHMS)}")
        weight, entry = ALGORITHMS[name.upper()]
        block = settings.get("group_size")
        if weight[0].dtype == "int4" and block is not None:
            weight = (Numeric("int4", "block", words.block(block, "quantization_config: group_size")[:1]), *weight[1:])
        smoothed = "awq" if weight[0].dtype in ("int4", "float4_e2m1fn") else "smoothquant"
        form = Format(weight, entry, smoothed if "pre_quant_scale" in tensors else "max")
        return StorageLayout(form, NAMES, packed="out" if weight[0].dtype == "int4" else "in")


def reader(section: Mapping[str, Any]) -> ModelOpt:
    """Read `quantization` of hf_quant_config.json, or `quantization_config`: both have the same fields."""
    layers = section.get("quantized_layers")
    return ModelOpt(section, layers if isinstance(layers, Mapping) else {})
