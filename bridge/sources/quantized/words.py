"""AutoAWQ and GPTQ: integer codes in 32-bit words, stored [in, out].

They are shown to the other readers as compressed-tensors stores them, [out, in]: reading any row reads the whole
tensor. Activation order is refused: zero points and orders are read when it opens, since what the config says of them
(`sym`, `desc_act`) does not decide it. Zero points in the middle of the range are those of symmetric codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.text import number
from bridge.core.values import Format, Numeric, TensorSpec
from bridge.quant.codec.blocks import IN_INT32
from bridge.sources.quantized import fields as words
from bridge.sources.quantized.parts import Array, QuantizedTensors, StorageLayout, Unread, take
from bridge.sources.weights.shards import Shard, Weights

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
NAMES = dict(zip(("codes", "zeros", "scale", "order"), SUFFIXES, strict=True))
DTYPES = {4: "int4", 8: "int8"}
HELD = 4  # turned tensors that are kept: codes and scales of a weight, for two threads
FORMS = {"gptq": 1, "gptq_v2": 0}  # `checkpoint_format` -> what GPTQ's readers add to a stored zero point


@dataclass(frozen=True)
class Words:
    """The `Reader` of a `quantization_config`. `refused`: module -> why its tensors do not fit.

    `shifted`: modules whose zero points are not the middle of the range.
    """

    section: Mapping[str, Any]
    method: str
    refused: Mapping[str, str]
    shifted: frozenset[str] = frozenset()
    companions: tuple[str, ...] = SUFFIXES
    kv: Numeric | None = None

    def layout(self, module: str, tensors: Mapping[str, TensorSpec]) -> StorageLayout | str:
        if module in self.refused:
            return self.refused[module]
        numeric = _numeric(self.section, self.method)
        if isinstance(numeric, str):
            return numeric
        numeric = dataclasses.replace(numeric, zero_points=module in self.shifted)
        return StorageLayout(Format((numeric,)), NAMES, "int32")


@dataclass(frozen=True)
class Turned:
    """A tensor of words or scales as a shard of [out, in]. `turned`: reads it whole, and keeps the last ones."""

    inner: Shard
    turned: Callable[[str], Array]

    @property
    def path(self) -> Path:
        return self.inner.path

    def offset(self, name: str) -> int:
        return self.inner.offset(name)

    def read(self, name: str) -> Array:
        return self.turned(name)

    def read_rows(self, name: str, begin: int, end: int, out: Array | None = None) -> Array:
        return self.turned(name)[begin:end]


def tensors_of(section: Mapping[str, Any], method: str, weights: Weights, dtype: str) -> QuantizedTensors:
    """Give every module its parts, of weights in `dtype`."""
    numeric = _numeric(section, method)
    shown, refused, shifted = weights, dict[str, str](), set[str]()
    if isinstance(numeric, Numeric):
        shown, refused, shifted = _shown(weights, numeric, section, method)
    tensors = take(Words(section, method, refused, frozenset(shifted)), shown, dtype)
    across = {
        module: dataclasses.replace(stored, spec=dataclasses.replace(stored.spec, across=True))
        for module, stored in tensors.stored.items()
    }
    return dataclasses.replace(tensors, stored=across)


def _numeric(section: Mapping[str, Any], method: str) -> Numeric | str:
    where = "quantization_config"
    bits = words.whole(section.get("bits", section.get("w_bit")), f"{where}: bits", 4)
    size = words.whole(section.get("group_size", section.get("q_group_size")), f"{where}: group_size", 128)
    if bits not in ((4,) if method == "awq" else DTYPES):
        return Unread(f"{bits} bits of {method} are not supported; known: 4{'' if method == 'awq' else ' or 8'}")
    if method == "gptq" and _form(section) not in FORMS:
        return Unread(f"checkpoint_format {_form(section)!r} is not supported; known: {', '.join(FORMS)}")
    if str(section.get("version", "gemm")).lower() != "gemm":
        return Unread(f"version {section['version']!r} of AutoAWQ is not supported; known: gemm")
    if size <= 0:
        return Numeric(DTYPES[bits], "channel")
    return Numeric(DTYPES[bits], "block", (size,))


def _form(section: Mapping[str, Any]) -> str:
    """The name of GPTQ's checkpoint format; the first one where none is given, as gptqmodel takes it."""
    return str(section.get("checkpoint_format") or section.get("format") or "gptq")


def _shown(
    weights: Weights, numeric: Numeric, section: Mapping[str, Any], method: str
) -> tuple[Weights, dict[str, str], set[str]]:
    """The weights with words and scales as [out, in], the modules that cannot be, and those with zero points."""
    from bridge.quant.codec.packing import zero_word  # opening a checkpoint without words loads no kernel

    specs, holder = dict(weights.specs), dict(weights.holder)
    refused: dict[str, str] = {}
    shifted: set[str] = set()
    packed = "awq" if method == "awq" else "int32"
    added = 0 if packed == "awq" else FORMS[_form(section)]
    turned = lru_cache(maxsize=HELD)(partial(_turn, weights, numeric.dtype, packed, added))
    for name in [name for name in specs if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        own = {suffix: weights.specs.get(f"{module}.{suffix}") for suffix in SUFFIXES}
        if why := _misfit(own, numeric, section, packed, weights):
            refused[module] = why
            continue
        for suffix in ("qweight", "scales"):
            before = own[suffix]
            assert before
            shape = _by_row(before.shape, numeric, packed) if suffix == "qweight" else before.shape[::-1]
            spec = dataclasses.replace(before, shape=shape, across=True)
            specs[before.name], holder[before.name] = spec, Turned(weights.holder[before.name], turned)
        zeros, scale = own["qzeros"], own["scales"]
        if zeros and scale and (weights.read(zeros.name) != zero_word(numeric.dtype, added)).any():
            shifted.add(module)
            specs[zeros.name] = dataclasses.replace(zeros, shape=scale.shape[::-1], dtype="int8", across=True)
            holder[zeros.name] = Turned(weights.holder[zeros.name], turned)
    return dataclasses.replace(weights, specs=specs, holder=holder), refused, shifted


def _misfit(
    own: Mapping[str, TensorSpec | None], numeric: Numeric, section: Mapping[str, Any], packed: str, weights: Weights
) -> str:
    """Why the tensors of a module cannot be read; "" if they can."""
    codes, scale, zeros, order = own["qweight"], own["scales"], own["qzeros"], own["g_idx"]
    if codes is None or scale is None or len(codes.shape) != 2 or codes.dtype != "int32" or len(scale.shape) != 2:
        return "qweight must be int32 [.., ..], and scales a matrix beside it"
    in_ = codes.shape[0] * (1 if packed == "awq" else IN_INT32[numeric.dtype])
    if zeros is not None and (why := _zeros(zeros, scale, numeric, section, packed, weights)):
        return why
    if zeros is None and packed != "awq" and not section.get("sym", True):
        return "sym is false in quantization_config, but its zero points (qzeros) are missing"
    if numeric.block and -(-in_ // numeric.block[0]) != scale.shape[0]:
        return (
            f"quantization_config says group_size {numeric.block[0]}, but scales has {number(scale.shape[0], 'group')} "
            f"of its {in_} columns; write the group_size there that the tensors have"
        )
    if order is not None:
        block = (numeric.block or (in_,))[0]
        if order.shape != (in_,):
            return f"g_idx has shape {order.shape}, but its weight has {in_} columns"
        if (weights.read(order.name) != np.arange(in_) // block).any():
            return Unread("its columns are permuted (activation order: g_idx), which no target supports")
    elif section.get("desc_act") and numeric.block:
        return "its columns may be permuted (desc_act is true), and no g_idx says in which order"
    return ""


def _zeros(
    zeros: TensorSpec, scale: TensorSpec, numeric: Numeric, section: Mapping[str, Any], packed: str, weights: Weights
) -> str:
    """Why the zero points of a module cannot be read; "" if they can."""
    from bridge.quant.codec.packing import zero_word

    if zeros.dtype != "int32":
        return f"qzeros must be int32, but is {zeros.dtype}"
    stored, form = weights.read(zeros.name), _form(section)
    added = 0 if packed == "awq" else FORMS[form]
    count = IN_INT32[numeric.dtype]
    if zeros.shape != (scale.shape[0], -(-scale.shape[1] // count)):
        return f"qzeros has shape {zeros.shape}, but its scales have {scale.shape}, {count} of them to a word"
    if (stored == zero_word(numeric.dtype, added)).all():
        return ""
    other = next((name for name in FORMS if (stored == zero_word(numeric.dtype, FORMS[name])).all()), "")
    if packed != "awq" and other:
        return (
            f"its zero points (qzeros) are the middle of the range in checkpoint_format {other!r}, not in {form!r}, "
            f"which quantization_config names; if {other!r} is right, write it there"
        )
    return ""


def _by_row(shape: tuple[int, ...], numeric: Numeric, packed: str) -> tuple[int, int]:
    """The shape of int32 words [out, in / 8] for those of the file."""
    count = IN_INT32[numeric.dtype]
    return (shape[1] * count, -(-shape[0] // count)) if packed == "awq" else (shape[1], shape[0])


def _turn(weights: Weights, dtype: str, packed: str, added: int, name: str) -> Array:
    from bridge.quant.codec.arrays import transposed
    from bridge.quant.codec.packing import words_by_row, zero_points

    stored = np.ascontiguousarray(weights.read(name))
    if name.endswith(".qzeros"):
        return zero_points(stored, dtype, packed, added)
    return words_by_row(stored, dtype, packed) if name.endswith(".qweight") else transposed(stored)
