"""compressed-tensors: a format for each group of modules.

Groups are given by class, name or regular expression. Asymmetric weights, sparsity and activation order are refused.
Regular expressions are the format's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.core.text import nearest
from bridge.core.values import NARROW, Format, Numeric, TensorSpec
from bridge.sources.quantized import fields as words
from bridge.sources.quantized.parts import StorageLayout, Unread

HERE = "quantization_config"
FORMATS = (
    "naive-quantized", "float-quantized", "int-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
SUFFIXES = (
    "weight_packed", "weight_scale", "weight_shape", "weight_global_scale", "weight_zero_point", "weight_g_idx",
    "input_scale", "input_global_scale", "input_zero_point",
)  # fmt: skip
DTYPES = {("int", 8): "int8", ("int", 4): "int4", ("float", 8): "float8_e4m3fn", ("float", 4): "float4_e2m1fn"}
DTYPES |= {("int", bits): dtype for dtype, bits in NARROW.items()}
STRATEGIES = {"tensor": "tensor", "channel": "channel", "group": "block", "tensor_group": "block", "block": "block"}


@dataclass(frozen=True)
class Compressed:
    """The `Reader` of a `quantization_config`. `shapes`: module -> its `weight_shape`, two numbers read beforehand."""

    section: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    companions: tuple[str, ...] = SUFFIXES

    @property
    def kv(self) -> Numeric | None:
        scheme = words.mapping(self.section.get("kv_cache_scheme"), f"{HERE}: kv_cache_scheme")
        dtype = DTYPES.get((str(scheme.get("type")), words.whole(scheme.get("num_bits"), f"{HERE}: num_bits", 0)))
        return Numeric(dtype, "tensor") if dtype else None

    def layout(self, module: str, tensors: Mapping[str, TensorSpec]) -> StorageLayout | str:
        group = self.group(module)
        if group is None:
            return "no group of quantization_config matches it"
        form = group.get("format") or self.section.get("format")
        if form not in FORMATS:
            return Unread(f"format {form!r} cannot be read; {nearest(str(form), FORMATS)}")
        weights, entry = group.get("weights"), group.get("input_activations")
        if not isinstance(weights, Mapping):
            return "its group has no weights"
        if "weight_g_idx" in tensors:
            return Unread("its columns are permuted (activation order: weight_g_idx), which no target supports")
        if "input_zero_point" in tensors:
            return Unread("asymmetric: its input_zero_point is not 0, and every format here has symmetric inputs")
        shifted = not self.is_symmetric(module)
        if "weight_zero_point" in tensors and not shifted:
            return Unread(
                "asymmetric: its weight_zero_point is not 0, and its group says that it is symmetric; write "
                "symmetric = false there if the zero points are right"
            )
        numeric = _numeric(weights)
        if isinstance(numeric, str):
            return numeric
        if shifted and numeric.dtype not in ("int4", "int8", *NARROW):
            return Unread(f"asymmetric, as its group says, which {numeric.dtype} is in no format here")
        numeric = dataclasses.replace(numeric, zero_points=shifted)
        wide = numeric.two_level
        names = {"codes": "weight_packed" if "pack" in form else "weight", "scale": "weight_scale"}
        names |= {"scale_2": "weight_global_scale"} if wide else {}
        names |= {"input_scale": "input_global_scale" if "input_global_scale" in tensors else "input_scale"}
        names |= {"zeros": "weight_zero_point"} if shifted else {}
        names |= {"shape": "weight_shape"} if form == "pack-quantized" else {}
        inputs = _numeric(entry) if isinstance(entry, Mapping) else None
        if isinstance(inputs, str):
            return Unread(f"input activations: {inputs}")
        packed = "int32" if form == "pack-quantized" else "in" if "pack" in form else "byte"
        return StorageLayout(Format((numeric,), inputs), names, packed, wide, self.shapes.get(module, ()))

    def is_symmetric(self, module: str) -> bool:
        """Whether the module's group says so of its weights; the tensors may say otherwise."""
        weights = (self.group(module) or {}).get("weights")
        return not isinstance(weights, Mapping) or bool(weights.get("symmetric", True))

    def dtype(self, module: str) -> str:
        """That of the module's codes, as its group says; int8 if that is none: `layout` tells why."""
        weights = (self.group(module) or {}).get("weights")
        numeric = _numeric(weights) if isinstance(weights, Mapping) else ""
        return numeric.dtype if isinstance(numeric, Numeric) else "int8"

    def group(self, module: str) -> Mapping[str, Any] | None:
        """Return the group that names the module, else one that names a class: classes are unknown here, and Linear."""
        by_class = None
        for name, value in words.mapping(self.section.get("config_groups"), f"{HERE}: config_groups").items():
            group = words.mapping(value, where := f"{HERE}: {name}")
            for target in words.texts(group.get("targets"), f"{where}: targets"):
                if target == module or (target.startswith("re:") and words.matches(target[3:], module, where)):
                    return dict(group)
                if not target.startswith("re:") and "." not in target and target[:1].isupper() and by_class is None:
                    by_class = dict(group)
        return by_class


def _numeric(args: Mapping[str, Any]) -> Numeric | str:
    """Return the numeric of one set of quantization arguments, or why it is not supported."""
    dtype = DTYPES.get((str(args.get("type", "int")), words.whole(args.get("num_bits"), f"{HERE}: num_bits", 8)))
    if dtype is None:
        return Unread(
            f"{args.get('num_bits')} bits of {args.get('type')} are not supported; known: 2 to 6 and 8 of int, 4 and 8 "
            "of float"
        )
    size, dynamic = args.get("group_size"), bool(args.get("dynamic", False))
    strategy = args.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "token":
        return Numeric(dtype, "token", dynamic=dynamic)
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        return Unread(f"strategy {strategy!r} is not supported; {nearest(str(strategy), STRATEGIES)}")
    block: tuple[int, ...] = ()
    if strategy == "block":
        block = words.block(args.get("block_structure"), f"{HERE}: block_structure")
    elif STRATEGIES[strategy] == "block":
        block = words.block(size, f"{HERE}: group_size")[:1]
    scale = "float32"
    if dtype == "float4_e2m1fn" or args.get("scale_dtype") == "torch.uint8":
        scale = "float8_e4m3fn" if strategy == "tensor_group" else "float8_e8m0fnu"
    return Numeric(dtype, STRATEGIES[strategy], block, scale, dynamic)
