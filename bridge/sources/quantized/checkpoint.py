"""Quantized checkpoints as weights and config of the unquantized model.

Opening reads no codes and needs no framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.core.dtypes import FLOATS
from bridge.core.errors import BridgeError
from bridge.core.parsing.limited import load_json
from bridge.core.text import listed
from bridge.core.values import Numeric, TensorSpec, main_dtype
from bridge.sources.quantized import compressed_tensors as compressed
from bridge.sources.quantized import deepseek as blocks
from bridge.sources.quantized import gpt_oss as mxfp4
from bridge.sources.quantized import modelopt, points, words
from bridge.sources.quantized.fields import (
    BESIDE,
    CONFIGS,
    MODELOPT_FILE,
    ROTATED,
    of_inputs,
    sections,
    unknown,
    why_unread,
)
from bridge.sources.quantized.parts import Array, QuantizedTensors, QuantizedWeight, Reader, take
from bridge.sources.weights.shards import Shard, Weights
from bridge.tables.architectures.structure import turned_weights


@dataclass(frozen=True)
class Quantized:
    """A checkpoint as if unquantized: its weights and config, and the stored codes and scales behind them.

    `stored`: the same weights with rotations as they are stored, for who copies codes. `entries`: of the
    `quantization_config` of a `method`, which who copies codes writes too. `unread`: why weights are not decoded.
    `of_inputs`: entries that who copies codes writes into a config of the same method.
    """

    weights: Weights
    config: dict[str, Any]
    tensors: QuantizedTensors
    kv: Numeric | None
    stored: Weights = field(default_factory=Weights)
    method: str = ""
    entries: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    of_inputs: Mapping[str, Any] = field(default_factory=dict)


def dequantized(root: Path, config: dict[str, Any], weights: Weights) -> Quantized | None:
    """Read a quantized checkpoint of a known kind; None if nothing in it is quantized in a supported way."""
    section, own = next(sections(config), {}), _modelopt_file(root)
    method = str(section.get("quant_method", "modelopt" if own else ""))
    result = _read(section, own, method, config, weights)
    if result is None:
        return None
    tensors, kv = result
    if not tensors.stored and not tensors.attention and not tensors.problems:
        return None
    specs: dict[str, TensorSpec] = {}
    holder: dict[str, Shard] = {}
    by_codes = {stored.parts["codes"].spec.name: stored for stored in tensors.stored.values()}
    for name, spec in weights.specs.items():
        if stored := by_codes.get(name):
            specs[stored.spec.name] = stored.plain
            holder[stored.spec.name] = Dequantized(stored, weights.holder[name])
        elif name not in tensors.used:
            specs[name], holder[name] = spec, weights.holder[name]
    plain = Weights(specs, holder, weights.files, weights.problems)
    entries = unknown(own or section if method == "modelopt" else section, method)
    unread = tuple(why_unread(name, method) for name in entries if name != ROTATED or method != "compressed-tensors")
    inputs = of_inputs(section, method)
    quantized = Quantized(plain, without(config), tensors, kv, plain, method, entries, unread, of_inputs=inputs)
    rotated = ROTATED in entries and method == "compressed-tensors"
    return _turned_back(quantized, section, weights) if rotated else _refusing(quantized)


def _turned_back(quantized: Quantized, section: Mapping[str, Any], weights: Weights) -> Quantized:
    """The same with the weights that the model has without rotations of activations."""
    from bridge.sources.quantized.rotations import Rotated, rotations  # loads the codecs

    plain, modules = quantized.weights, quantized.tensors.stored
    found = rotations(section, quantized.config, weights, plain.specs, modules)
    unread = tuple(f"{problem}; start from the unquantized checkpoint" for problem in found.problems)
    specs = {name: spec for name, spec in plain.specs.items() if name not in found.matrices}
    holder = {name: plain.holder[name] for name in specs}
    stored = dataclasses.replace(plain, specs=specs, holder=dict(holder))
    for module, rotation in found.modules.items():
        for name in (f"{module}.weight", f"{module}.bias"):
            inner, spec = holder.get(name), specs.get(name)
            if inner is None or spec is None or (name.endswith(".bias") and rotation.after is None):
                continue
            kept = spec
            if isinstance(inner, Dequantized):  # rounded once, after it is turned
                kept = dataclasses.replace(spec, dtype="float32")
                of = dataclasses.replace(inner.stored, spec=dataclasses.replace(inner.stored.spec, dtype="float32"))
                inner = dataclasses.replace(inner, stored=of)
            holder[name] = Rotated(inner, kept, spec, rotation)
    return _refusing(
        dataclasses.replace(
            quantized, weights=dataclasses.replace(plain, specs=specs, holder=holder), stored=stored,
            unread=(*quantized.unread, *unread), matrices=found.matrices,
        )
    )  # fmt: skip


def _refusing(quantized: Quantized) -> Quantized:
    """The same; reading a weight that is not decoded is an error."""
    if not quantized.unread:
        return quantized
    weights = quantized.weights
    codes = {stored.spec.name for stored in quantized.tensors.stored.values()}
    holder = {
        name: Refused(shard, quantized.unread) if name in codes else shard for name, shard in weights.holder.items()
    }
    return dataclasses.replace(quantized, weights=dataclasses.replace(weights, holder=holder))


@dataclass(frozen=True)
class Refused:
    """A weight whose codes are not understood, as a shard: reading it is a SourceError."""

    inner: Shard
    why: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.inner.path

    def offset(self, name: str) -> int:
        return self.inner.offset(name)

    def read(self, name: str) -> Array:
        raise listed(name, self.why)

    def read_rows(self, name: str, begin: int, end: int, out: Array | None = None) -> Array:
        raise listed(name, self.why)


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config, and its sections, without quantization."""
    return {
        key: without(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in (*CONFIGS, BESIDE)
    }


@dataclass(frozen=True)
class Dequantized:
    """One weight as a shard: reading it dequantizes the codes in the file."""

    stored: QuantizedWeight
    codes: Shard

    @property
    def path(self) -> Path:
        return self.codes.path

    def offset(self, name: str) -> int:
        return self.codes.offset(self.stored.parts["codes"].spec.name)

    def read(self, name: str) -> Array:
        return self.read_rows(name, 0, self.stored.plain.shape[0])

    def read_rows(self, name: str, begin: int, end: int, out: Array | None = None) -> Array:
        from bridge.sources.quantized.dequantize import weight_rows  # opening a checkpoint loads no kernel

        return weight_rows(self.stored, begin, end, out)


def _turned(tensors: QuantizedTensors, config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> QuantizedTensors:
    """Mark weights that ModelOpt's exporter turned: it stores a Conv1D, [in, out] in its architecture, as [out, in].

    It also turns unquantized ones; transformers and bridge do not, and the shape of a square one does not tell.
    """
    weights = {stored.spec.name: stored.plain for stored in tensors.stored.values()}
    try:
        turned = turned_weights(config, {**specs, **weights})
    except BridgeError:
        return tensors  # asking for the structure reports what is wrong with the config
    unclear = [name for name in turned.keys() - weights.keys() if specs[name].shape == turned[name][::-1]]
    problems = [
        f"{name}: not quantized, and perhaps not [in, out] as in the architecture: ModelOpt's exporter stores it "
        "[out, in]; quantize this module too, or give the unquantized model"
        for name in sorted(unclear)
    ]
    stored = {module: dataclasses.replace(of, turned=of.spec.name in turned) for module, of in tensors.stored.items()}
    return dataclasses.replace(
        tensors, stored=stored, problems=(*tensors.problems, *problems), unread=(*tensors.unread, *problems)
    )


def _dtype(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> str:
    """Return the dtype of the unquantized model: its config's, else that of most plain values."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if part.get(key) in FLOATS:
                return str(part[key])
    return main_dtype((spec for name, spec in specs.items() if name.endswith("weight")), "bfloat16", FLOATS)


def _read(
    section: Mapping[str, Any], own: dict[str, Any], method: str, config: Mapping[str, Any], weights: Weights
) -> tuple[QuantizedTensors, Numeric | None] | None:
    dtype = _dtype(config, weights.specs)
    if method == "mxfp4":
        return mxfp4.take(weights, dtype), None
    if method in ("awq", "gptq"):
        return words.tensors_of(section, method, weights, dtype), None
    reader: Reader
    match method:
        case "modelopt":
            reader = modelopt.reader(own or section)
        case "fp8":
            reader = blocks.reader(section)
        case "compressed-tensors":
            reader = compressed.Compressed(section, _shapes(weights))
        case _:
            return None
    zeros: frozenset[str] = frozenset()
    if isinstance(reader, compressed.Compressed):
        zeros = _zero_points(weights, reader)
        shown = {name: spec for name, spec in weights.specs.items() if name not in zeros}
        weights = points.unpacked(dataclasses.replace(weights, specs=shown), reader.dtype)
    tensors = take(reader, weights, dtype)
    tensors = dataclasses.replace(tensors, used=tensors.used | zeros)
    return _turned(tensors, config, weights.specs) if method == "modelopt" else tensors, reader.kv


def _modelopt_file(root: Path) -> dict[str, Any]:
    try:
        section = load_json(root / MODELOPT_FILE)["quantization"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return section if isinstance(section, dict) else {}


def _zero_points(weights: Weights, reader: compressed.Compressed) -> frozenset[str]:
    """Zero points that are all 0, as some versions of compressed-tensors store them beside symmetric codes."""
    names = [name for name in weights.specs if name.endswith((".weight_zero_point", ".input_zero_point"))]
    names = [name for name in names if reader.is_symmetric(name.rpartition(".")[0])]
    return frozenset(name for name in names if not weights.read(name).any())


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    """Module -> its `weight_shape`: two numbers that packed codes alone do not tell."""
    suffix = ".weight_shape"
    names = [name for name, spec in weights.specs.items() if name.endswith(suffix) and spec.shape == (2,)]
    return {name.removesuffix(suffix): tuple(int(n) for n in weights.read(name)) for name in names}
