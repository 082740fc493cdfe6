"""Quantized weights as checkpoints store them: what each module's tensors are; reads no weight to find that out.

One file here for each writer: `modelopt` (unified checkpoints), `blocks` (FP8 as DeepSeek publishes it), `compressed`
(compressed-tensors). Each answers for one module which format it has and which of its tensors is which part. `mxfp4`
(gpt-oss) has stacks of experts, which are no modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from bridge.dtypes import FLOATS, to_float32
from bridge.errors import SchemeError
from bridge.quant.blocks import FOUR_BITS, IN_INT32, grid
from bridge.values import Coding, Format, LazyTensor, Numeric, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

SCALES = {"float32": FLOATS, "float8_e4m3fn": ("float8_e4m3fn",), "float8_e8m0fnu": ("uint8", "float8_e8m0fnu")}
# What codes are stored as; `int32` holds eight (int4) or four (int8) of them.
CODES = {
    "float8_e4m3fn": ("float8_e4m3fn",),
    "int8": ("int8", "int32"),
    "int4": ("uint8", "int8", "int32"),
    "float4_e2m1fn": ("uint8",),
}


@dataclass(frozen=True)
class Told:
    """What a checkpoint's config says of one module. `names`: part -> suffix of its tensor.

    `packed`: see `bridge.values.Coding`; "byte" is one byte a code, of four bits too (int-quantized W4A8).
    `shape` is the weight's, where no tensor tells it. `reciprocal`: scales of whole tensors are stored as 1 / scale.
    """

    format: Format
    names: Mapping[str, str]
    packed: str = "in"
    reciprocal: bool = False
    shape: tuple[int, ...] = ()
    optional: tuple[str, ...] = ("input_scale", "pre_quant_scale")


class Reader(Protocol):
    """What the config of one writer says."""

    @property
    def companions(self) -> tuple[str, ...]:
        """Suffixes of the tensors that belong to a quantized module."""

    @property
    def kv(self) -> Numeric | None:
        """How keys and values are coded, where their scales are there."""

    def told(self, module: str, tensors: Mapping[str, TensorSpec]) -> Told | str:
        """What `module` is, from the specs of its tensors by suffix; a sentence where it cannot be read."""


@dataclass(frozen=True)
class Stored:
    """One quantized weight of a checkpoint. `spec` is the weight's as it would be unquantized, [out, in], of a stack of
    experts [experts, out, in].

    `parts`: "codes", "scale", "scale_2", "input_scale", "pre_quant_scale" -> the checkpoint's tensor, in its own shape.
    `rows(name, begin, end)` reads rows of one of those tensors. `reciprocal`: scale_2 and NVFP4's input scale are
    stored as 1 / scale. `turned`: the architecture has the weight as [in, out] (Conv1D), the codes are [out, in] still.
    """

    module: str
    spec: TensorSpec
    format: Format
    coding: Coding
    parts: Mapping[str, LazyTensor]
    rows: Callable[[str, int, int], Array] = field(compare=False)
    reciprocal: bool = False
    turned: bool = False

    @property
    def plain(self) -> TensorSpec:
        """The weight as the architecture has it."""
        *stack, out, in_ = self.spec.shape
        return dataclasses.replace(self.spec, shape=(*stack, in_, out)) if self.turned else self.spec

    def expert(self, number: int) -> Stored:
        """The matrix of one expert of a stack, its codes and scales in memory."""
        held = {part.spec.name: self.rows(part.spec.name, number, number + 1)[0] for part in self.parts.values()}
        parts = {
            key: LazyTensor(
                dataclasses.replace(part.spec, shape=part.spec.shape[1:]), partial(held.__getitem__, part.spec.name)
            )
            for key, part in self.parts.items()
        }
        spec = dataclasses.replace(self.spec, shape=self.spec.shape[1:])
        return dataclasses.replace(self, spec=spec, parts=parts, rows=lambda name, begin, end: held[name][begin:end])

    def number(self, part: str) -> np.float32:
        """The value of a scalar part."""
        found = self.parts[part]
        return np.float32(to_float32(found.read(), found.spec.dtype).reshape(()))

    @property
    def scale_is_float(self) -> bool:
        """False where scales are bits of e4m3 or e8m0."""
        return self.format.weight[0].scale_dtype == "float32"


@dataclass(frozen=True)
class Taken:
    """What a reader found in a checkpoint: quantized modules, the KV scales of attention modules, the tensors used."""

    stored: dict[str, Stored] = field(default_factory=dict)
    attention: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


class Tensors(Protocol):
    """The tensors of a checkpoint as they are stored."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def read(self, name: str) -> Array: ...

    def read_rows(self, name: str, begin: int, end: int) -> Array: ...


KV_SUFFIXES = {
    "k_scale": (".k_proj.k_scale", ".k_scale", ".k_proj.output_scale"),
    "v_scale": (".v_proj.v_scale", ".v_scale", ".v_proj.output_scale"),
}


def take(reader: Reader, tensors: Tensors, dtype: str) -> Taken:
    """Give every quantized module its parts; every companion that is missing or misshapen is one problem.

    dtype: of the weights when they are dequantized.
    """
    stored: dict[str, Stored] = {}
    problems: list[str] = []
    attention, used = _kv(tensors, problems)
    for module, found in _modules(reader, tensors.specs, used).items():
        used |= {f"{module}.{suffix}" for suffix in found}
        told = reader.told(module, found)
        if isinstance(told, str):
            problems.append(f"{module}: {told}")
            continue
        made = _stored(module, told, found, tensors, dtype)
        if isinstance(made, Stored):
            stored[module] = made
        else:
            problems += made
    return Taken(stored, attention, frozenset(used), tuple(problems))


def _modules(reader: Reader, specs: Mapping[str, TensorSpec], used: set[str]) -> dict[str, dict[str, TensorSpec]]:
    """Module -> its tensors by suffix, for those that have codes or a companion."""
    low = {dtype for kinds in CODES.values() for dtype in kinds}
    names = dict.fromkeys(
        module
        for name, spec in specs.items()
        if name not in used
        for module, _, suffix in [name.rpartition(".")]
        if suffix in reader.companions or (suffix == "weight" and spec.dtype in low and len(spec.shape) == 2)
    )
    return {
        module: {
            suffix: specs[f"{module}.{suffix}"]
            for suffix in ("weight", *reader.companions)
            if f"{module}.{suffix}" in specs
        }
        for module in names
    }


def _kv(tensors: Tensors, problems: list[str]) -> tuple[dict[str, dict[str, LazyTensor]], set[str]]:
    """Attention module -> its scales of keys and values, wherever a writer puts them."""
    found: dict[str, dict[str, LazyTensor]] = {}
    used: set[str] = set()
    for part, suffixes in KV_SUFFIXES.items():
        for suffix in suffixes:
            for name in [n for n in tensors.specs if n.endswith(suffix) and n not in used]:
                used.add(name)
                found.setdefault(name.removesuffix(suffix), {})[part] = lazy(tensors, name)
                if tensors.specs[name].size != 1 or tensors.specs[name].dtype not in FLOATS:
                    problems.append(f"{name}: {seen(tensors.specs[name])}; one float is a scale of keys or values")
    for module, parts in found.items():
        for lacking in KV_SUFFIXES.keys() - parts.keys():
            problems.append(f"{module}: has {', '.join(parts)} but no {lacking}")
    return found, used


def _stored(
    module: str, told: Told, found: Mapping[str, TensorSpec], tensors: Tensors, dtype: str
) -> Stored | list[str]:
    """Hold the tensors of a module to what its config says."""
    first = told.format.weight[0]
    codes = found.get(told.names["codes"])
    if codes is None:
        return [f"{module}.{told.names['codes']}: missing beside {', '.join(found)}"]
    if len(codes.shape) != 2 or codes.dtype not in CODES[first.dtype]:
        return [f"{codes.name}: {seen(codes)}, cannot hold {first.dtype} codes ({' or '.join(CODES[first.dtype])})"]
    shape = told.shape or _unpacked_shape(codes, first.dtype, told.packed)
    problems = _misfits(codes, first.dtype, told.packed, shape)
    try:
        wanted = _wanted(told.format, shape)
    except SchemeError as error:
        return [*problems, str(error)]
    parts = {"codes": lazy(tensors, codes.name)}
    for part, (kinds, extents) in wanted.items():
        suffix = told.names.get(part)
        spec = found.get(suffix) if suffix else None
        if spec is None:
            if part not in told.optional and suffix:
                problems.append(f"{module}.{suffix}: missing; {codes.name} cannot be dequantized without it")
            continue
        if spec.dtype not in kinds or _squeezed(spec.shape) != _squeezed(extents):
            problems.append(f"{spec.name}: {seen(spec)}, but the weight {shape} needs {kinds[0]} {extents}")
        parts[part] = lazy(tensors, spec.name)
    extra = [s for s in found if s not in (*told.names.values(), "weight")]
    problems += [f"{module}.{suffix}: nothing in {told.format.weight[0].dtype} uses it" for suffix in extra]
    if problems:
        return problems
    weight = TensorSpec(f"{module}.weight", shape, dtype)
    scale = parts["scale"].spec.dtype
    coding = Coding(packed=told.packed, scale_dtype=scale if scale in FLOATS else "float32")
    return Stored(module, weight, told.format, coding, parts, tensors.read_rows, told.reciprocal)


def _wanted(format_: Format, shape: tuple[int, ...]) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Part -> (dtypes, shape without axes of one) of everything beside the codes."""
    first = format_.weight[0]
    scale = grid(first, shape, "out_in").shape
    wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {"scale": (SCALES[first.scale_dtype], scale)}
    if len(format_.weight) == 2 or first.scale_dtype == "float8_e4m3fn":
        wanted["scale_2"] = (FLOATS, ())
    wanted["input_scale"] = (FLOATS, ())
    wanted["pre_quant_scale"] = (FLOATS, (shape[1],))
    return wanted


def _unpacked_shape(codes: TensorSpec, dtype: str, packed: str) -> tuple[int, ...]:
    out, in_ = codes.shape
    if packed == "int32":
        return out, in_ * IN_INT32[dtype]
    if dtype not in FOUR_BITS or packed == "byte":
        return out, in_
    return (2 * out, in_) if packed == "out" else (out, 2 * in_)


def _misfits(codes: TensorSpec, dtype: str, packed: str, shape: tuple[int, ...]) -> list[str]:
    """Codes are padded to whole words along `in` only as int32."""
    out, in_ = _unpacked_shape(codes, dtype, packed)
    word = IN_INT32[dtype] if packed == "int32" else 1
    fits = len(shape) == 2 and out == shape[0] and in_ - word < shape[1] <= in_
    if fits and (codes.dtype == "int32") == (packed == "int32"):
        return []
    return [f"{codes.name}: {seen(codes)}, which does not hold a weight of {shape}"]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def seen(spec: TensorSpec) -> str:
    """What a tensor is, for a sentence that says what it should be."""
    return f"is {spec.dtype} {spec.shape}"


def lazy(tensors: Tensors, name: str) -> LazyTensor:
    """One of `tensors`, read when it is asked for."""
    return LazyTensor(tensors.specs[name], lambda: tensors.read(name))
