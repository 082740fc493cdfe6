"""Quantized weights as checkpoints store them: the parts of each module.

Each writer has a file with a `Reader`: `modelopt` (unified checkpoints), `deepseek` (FP8 as DeepSeek publishes it),
`compressed_tensors`. It returns the format of a module and the tensor of each part. `gpt_oss` has stacks of experts,
which are not modules. No weight is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from bridge.core.dtypes import FLOATS, to_float32
from bridge.core.errors import SchemeError
from bridge.core.text import fold_problems
from bridge.core.values import NARROW, Encoding, Format, LazyTensor, Numeric, TensorSpec, code_bits
from bridge.quant.codec.blocks import FOUR_BITS, grid
from bridge.quant.codec.decode import values
from bridge.sources.weights.shards import Weights

Array = np.ndarray[Any, np.dtype[Any]]

POWERS = "float8_e8m0fnu"
SCALES = {
    "float32": (*FLOATS, POWERS),
    "float8_e4m3fn": ("float8_e4m3fn",),
    "float8_e8m0fnu": ("uint8", "float8_e8m0fnu"),
}
# Dtype of codes -> dtypes that store them; `int32` has eight (int4) or four (int8) of them.
CODES = {
    "float8_e4m3fn": ("float8_e4m3fn",),
    "int8": ("int8", "int32"),
    "int4": ("uint8", "int8", "int32"),
    "float4_e2m1fn": ("uint8",),
} | dict.fromkeys(NARROW, ("int32",))
OPTIONAL = ("input_scale", "pre_quant_scale")


@dataclass(frozen=True)
class StorageLayout:
    """How a checkpoint stores one module, by its config. `names`: part -> suffix of its tensor.

    `packed`: see `bridge.core.values.Encoding`; "byte" is one byte per code, also of four bits (int-quantized W4A8).
    `shape`: the weight's, if the shape of the codes does not tell it. `reciprocal`: per-tensor scales are 1 / scale.
    """

    format: Format
    names: Mapping[str, str]
    packed: str = "in"
    reciprocal: bool = False
    shape: tuple[int, ...] = ()


class Unread(str):
    """Why a layout is not read here, though its tensors may be whole."""


class Reader(Protocol):
    """The config of one writer."""

    @property
    def companions(self) -> tuple[str, ...]:
        """Suffixes of a quantized module's further tensors."""

    @property
    def kv(self) -> Numeric | None:
        """The numeric of keys and values, if they have scales."""

    def layout(self, module: str, tensors: Mapping[str, TensorSpec]) -> StorageLayout | str:
        """The layout of `module`, from the specs of its tensors by suffix, or why there is none."""


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized weight. `spec`: of the unquantized weight, [out, in], for a stack of experts [experts, out, in].

    `parts`: "codes", "scale", "zeros" (zero points of signed codes, int8), "scale_2", "input_scale", "pre_quant_scale"
    -> the checkpoint's tensor, in its own shape. `rows(name, begin, end)` reads rows of one of those tensors.
    `reciprocal`: scale_2 and NVFP4's input scale are stored as 1 / scale. `turned`: the architecture has the weight as
    [in, out] (Conv1D), the codes are [out, in].
    """

    module: str
    spec: TensorSpec
    format: Format
    coding: Encoding
    parts: Mapping[str, LazyTensor]
    rows: Callable[[str, int, int], Array] = field(compare=False)
    reciprocal: bool = False
    turned: bool = False

    @property
    def plain(self) -> TensorSpec:
        """The weight's spec in the architecture."""
        *stack, out, in_ = self.spec.shape
        return dataclasses.replace(self.spec, shape=(*stack, in_, out)) if self.turned else self.spec

    def expert(self, number: int) -> QuantizedWeight:
        """Return one expert's matrix of a stack, with its codes and scales in memory."""

        def unstacked(spec: TensorSpec) -> TensorSpec:
            return dataclasses.replace(spec, shape=spec.shape[1:])

        arrays = {part.spec.name: self.rows(part.spec.name, number, number + 1)[0] for part in self.parts.values()}
        parts = {
            key: LazyTensor(unstacked(part.spec), partial(arrays.__getitem__, part.spec.name))
            for key, part in self.parts.items()
        }
        return dataclasses.replace(
            self, spec=unstacked(self.spec), parts=parts, rows=lambda name, begin, end: arrays[name][begin:end]
        )

    def number(self, part: str) -> np.float32:
        """Read the value of a scalar part."""
        tensor = self.parts[part]
        return np.float32(to_float32(tensor.read(), tensor.spec.dtype).reshape(()))

    @property
    def scale_is_float(self) -> bool:
        """False if scales are bits of e4m3 or e8m0."""
        return self.format.weight[0].scale_dtype == "float32"


@dataclass(frozen=True)
class QuantizedTensors:
    """The quantized modules of a checkpoint, the KV scales of attention modules, the tensors used, all problems.

    `unread`: those of the problems that are about layouts; see `Unread`.
    """

    stored: dict[str, QuantizedWeight] = field(default_factory=dict)
    attention: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


KV_SUFFIXES = {
    "k_scale": (".k_proj.k_scale", ".k_scale", ".k_proj.output_scale"),
    "v_scale": (".v_proj.v_scale", ".v_scale", ".v_proj.output_scale"),
}


def take(reader: Reader, weights: Weights, dtype: str) -> QuantizedTensors:
    """Give every quantized module its parts, of weights in `dtype`; each missing or misshapen tensor is one problem."""
    stored: dict[str, QuantizedWeight] = {}
    found: list[str] = []
    attention, used = _kv(weights, found)
    problems: list[tuple[str, str]] = [("", text) for text in found]
    for module, specs in _modules(reader, weights.specs, used).items():
        used |= {f"{module}.{suffix}" for suffix in specs}
        layout = reader.layout(module, specs)
        if isinstance(layout, str):
            problems.append((module, layout))
            continue
        weight = _stored(module, layout, specs, weights, dtype)
        if isinstance(weight, QuantizedWeight):
            stored[module] = weight
        else:
            problems += [("", text) for text in weight]
    unread = fold_problems(problem for problem in problems if isinstance(problem[1], Unread))
    return QuantizedTensors(stored, attention, frozenset(used), tuple(fold_problems(problems)), tuple(unread))


def _modules(reader: Reader, specs: Mapping[str, TensorSpec], used: set[str]) -> dict[str, dict[str, TensorSpec]]:
    """Module -> its tensors by suffix, for modules with codes or a companion."""
    low = {dtype for kinds in CODES.values() for dtype in kinds}
    modules: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in specs.items():
        module, _, suffix = name.rpartition(".")
        codes = suffix == "weight" and spec.dtype in low and len(spec.shape) == 2
        if name not in used and module not in modules and (codes or suffix in reader.companions):
            names = {end: f"{module}.{end}" for end in ("weight", *reader.companions)}
            modules[module] = {end: specs[own] for end, own in names.items() if own in specs}
    return modules


def _kv(weights: Weights, problems: list[str]) -> tuple[dict[str, dict[str, LazyTensor]], set[str]]:
    """Attention module -> its scales of keys and values, under the suffixes of all writers."""
    scales: dict[str, dict[str, LazyTensor]] = {}
    used: set[str] = set()
    for part, suffixes in KV_SUFFIXES.items():
        for suffix in suffixes:
            for name in [n for n in weights.specs if n.endswith(suffix) and n not in used]:
                used.add(name)
                scales.setdefault(name.removesuffix(suffix), {})[part] = weights.lazy(name)
                if weights.specs[name].size != 1 or weights.specs[name].dtype not in FLOATS:
                    problems.append(f"{name}: {seen(weights.specs[name])}; one float is a scale of keys or values")
    for module, parts in scales.items():
        for lacking in KV_SUFFIXES.keys() - parts.keys():
            problems.append(f"{module}: has {', '.join(parts)} but no {lacking}")
    return scales, used


def _stored(
    module: str, layout: StorageLayout, specs: Mapping[str, TensorSpec], weights: Weights, dtype: str
) -> QuantizedWeight | list[str]:
    """Check the tensors of a module against its layout."""
    first = layout.format.weight[0]
    codes = specs.get(layout.names["codes"])
    if codes is None:
        return [f"{module}.{layout.names['codes']}: missing beside {', '.join(specs)}"]
    if len(codes.shape) != 2 or codes.dtype not in CODES[first.dtype]:
        return [f"{codes.name}: {seen(codes)}, cannot hold {first.dtype} codes ({' or '.join(CODES[first.dtype])})"]
    shape = layout.shape or _unpacked_shape(codes, first.dtype, layout.packed)
    problems = _misfits(codes, first.dtype, layout.packed, shape)
    try:
        expected = _expected(layout.format, shape)
    except SchemeError as error:
        return [*problems, str(error)]
    parts = {"codes": weights.lazy(codes.name)}
    for part, (kinds, extents) in expected.items():
        suffix = layout.names.get(part)
        spec = specs.get(suffix) if suffix else None
        if spec is None:
            if part not in OPTIONAL and suffix:
                problems.append(f"{module}.{suffix}: missing; {codes.name} cannot be dequantized without it")
            continue
        if spec.dtype not in kinds or not _fits(spec.shape, extents):
            problems.append(f"{spec.name}: {seen(spec)}, but the weight {shape} needs {kinds[0]} {extents}")
        parts[part] = weights.lazy(spec.name)
    extra = [suffix for suffix in specs if suffix not in (*layout.names.values(), "weight")]
    problems += [f"{module}.{suffix}: nothing in {first.dtype} uses it" for suffix in extra]
    if problems:
        return problems
    weight = TensorSpec(f"{module}.weight", shape, dtype)
    rows: Callable[[str, int, int], Array] = weights.read_rows
    if first.scale_dtype == "float32" and parts["scale"].spec.dtype == POWERS:
        parts["scale"], rows = _as_floats(parts["scale"], weights)
    scale = parts["scale"].spec.dtype
    coding = Encoding(packed=layout.packed, scale_dtype=scale if scale in FLOATS else "float32")
    return QuantizedWeight(module, weight, layout.format, coding, parts, rows, layout.reciprocal)


def _as_floats(scale: LazyTensor, weights: Weights) -> tuple[LazyTensor, Callable[[str, int, int], Array]]:
    """Scales that are stored as powers of two (UE8M0) as float32, which holds them exactly; and how rows are read."""

    def rows(name: str, begin: int, end: int) -> Array:
        read = weights.read_rows(name, begin, end)
        return values(read, POWERS) if name == scale.spec.name else read

    spec = dataclasses.replace(scale.spec, dtype="float32")
    return LazyTensor(spec, lambda: values(scale.read().reshape(-1, 1), POWERS).reshape(spec.shape)), rows


def _expected(format_: Format, shape: tuple[int, ...]) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Part -> (dtypes, shape without axes of one) of all parts but the codes."""
    first = format_.weight[0]
    above = len(format_.weight) == 2 or first.two_level
    return {
        "scale": (SCALES[first.scale_dtype], grid(first, shape, "out_in").shape),
        **({"zeros": (("int8",), grid(first, shape, "out_in").shape)} if first.zero_points else {}),
        **({"scale_2": (FLOATS, ())} if above else {}),
        "input_scale": (FLOATS, ()),
        "pre_quant_scale": (FLOATS, (shape[1],)),
    }


def _unpacked_shape(codes: TensorSpec, dtype: str, packed: str) -> tuple[int, ...]:
    out, in_ = codes.shape
    if packed == "int32":
        return out, in_ * 32 // code_bits(dtype)
    if dtype not in FOUR_BITS or packed == "byte":
        return out, in_
    return (2 * out, in_) if packed == "out" else (out, 2 * in_)


def _misfits(codes: TensorSpec, dtype: str, packed: str, shape: tuple[int, ...]) -> list[str]:
    """Check that the codes have the weight's shape; only int32 pads them to whole words along `in`."""
    out, in_ = _unpacked_shape(codes, dtype, packed)
    word = -(-32 // code_bits(dtype)) if packed == "int32" else 1
    fits = len(shape) == 2 and out == shape[0] and in_ - word < shape[1] <= in_
    if fits and (codes.dtype == "int32") == (packed == "int32"):
        return []
    return [f"{codes.name}: {seen(codes)}, which does not hold a weight of {shape}"]


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a shape is the expected one, but for axes of one; two matrices have the same axes in the same order."""
    turned = len(shape) == len(expected) == 2 and shape != expected
    return _squeezed(shape) == _squeezed(expected) and not turned


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def seen(spec: TensorSpec) -> str:
    """Describe a tensor, for a sentence that says what it should be."""
    return f"is {spec.dtype} {spec.shape}"
