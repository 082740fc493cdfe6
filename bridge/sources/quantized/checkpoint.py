"""Quantized checkpoints as weights and config of the unquantized model.

Opening reads no codes and needs no framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.core.dtypes import FLOATS
from bridge.core.errors import BridgeError
from bridge.core.parsing.limited import load_json
from bridge.core.values import Numeric, TensorSpec, main_dtype
from bridge.sources.quantized import compressed_tensors as compressed
from bridge.sources.quantized import deepseek as blocks
from bridge.sources.quantized import gpt_oss as mxfp4
from bridge.sources.quantized import modelopt, words
from bridge.sources.quantized.fields import CONFIGS, MODELOPT_FILE, sections, unread
from bridge.sources.quantized.parts import Array, QuantizedTensors, QuantizedWeight, Reader, take
from bridge.sources.weights.shards import Shard, Weights
from bridge.tables.architectures.structure import turned_weights


@dataclass(frozen=True)
class Quantized:
    """A checkpoint as if unquantized: its weights and config, and the stored codes and scales behind them."""

    weights: Weights
    config: dict[str, Any]
    tensors: QuantizedTensors
    kv: Numeric | None


def dequantized(root: Path, config: dict[str, Any], weights: Weights) -> Quantized | None:
    """Read a quantized checkpoint of a known kind; None if nothing in it is quantized in a supported way."""
    result = _take(root, config, weights)
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
    return Quantized(plain, without(config), tensors, kv)


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config, and its sections, without quantization."""
    return {
        key: without(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in CONFIGS
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
    return dataclasses.replace(tensors, stored=stored, problems=(*tensors.problems, *problems))


def _dtype(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> str:
    """Return the dtype of the unquantized model: its config's, else that of most plain values."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if part.get(key) in FLOATS:
                return str(part[key])
    return main_dtype((spec for name, spec in specs.items() if name.endswith("weight")), "bfloat16", FLOATS)


def _take(root: Path, config: Mapping[str, Any], weights: Weights) -> tuple[QuantizedTensors, Numeric | None] | None:
    """Read what the config's writer stored, and its numeric for K and V; None for an unknown writer."""
    section, own = next(sections(config), {}), _modelopt_file(root)
    method = str(section.get("quant_method", "modelopt" if own else ""))
    taken = _read(section, own, method, config, weights)
    if taken is None:
        return None
    tensors, kv = taken
    problems = unread(own or section if method == "modelopt" else section, method)
    return dataclasses.replace(tensors, problems=(*tensors.problems, *problems)), kv


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
    tensors = take(reader, weights, dtype)
    return _turned(tensors, config, weights.specs) if method == "modelopt" else tensors, reader.kv


def _modelopt_file(root: Path) -> dict[str, Any]:
    try:
        section = load_json(root / MODELOPT_FILE)["quantization"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return section if isinstance(section, dict) else {}


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    """Module -> its `weight_shape`: two numbers that packed codes alone do not tell."""
    suffix = ".weight_shape"
    names = [name for name, spec in weights.specs.items() if name.endswith(suffix) and spec.shape == (2,)]
    return {name.removesuffix(suffix): tuple(int(n) for n in weights.read(name)) for name in names}
