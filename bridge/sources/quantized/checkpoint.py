"""Checkpoints that are quantized already: shows the weights that they stand for; reads no codes while opening.

The config that the model would have unquantized has no word of quantization left. Never imports a framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.dtypes import FLOATS
from bridge.errors import BridgeError
from bridge.json_data import load_json
from bridge.sources.shards import Shard, Weights
from bridge.sources.stored import Array, Reader, Stored, Taken, blocks, compressed, modelopt, mxfp4, take
from bridge.tables.structure import turned_weights
from bridge.values import Numeric, TensorSpec

CONFIGS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class Quantized:
    """A checkpoint as it would be unquantized: its weights, its config, and what was found in their place."""

    weights: Weights
    config: dict[str, Any]
    taken: Taken
    kv: Numeric | None


def dequantized(root: Path, config: dict[str, Any], weights: Weights) -> Quantized | None:
    """Read a quantized checkpoint of a known kind; None where nothing in it is quantized in a way that is read here."""
    found = _taken(root, config, weights)
    if found is None:
        return None
    taken, kv = found
    if not taken.stored and not taken.attention and not taken.problems:
        return None
    specs: dict[str, TensorSpec] = {}
    holder: dict[str, Shard] = {}
    by_codes = {stored.parts["codes"].spec.name: stored for stored in taken.stored.values()}
    for name, spec in weights.specs.items():
        if stored := by_codes.get(name):
            specs[stored.spec.name] = stored.plain
            holder[stored.spec.name] = Dequantized(stored, weights.holder[name])
        elif name not in taken.used:
            specs[name], holder[name] = spec, weights.holder[name]
    plain = Weights(specs, holder, weights.files, weights.problems)
    return Quantized(plain, without(config), taken, kv)


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the model as it would be unquantized, in its parts as well."""
    kept = {key: value for key, value in config.items() if key not in CONFIGS}
    return {
        key: without(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in kept.items()
    }


@dataclass(frozen=True)
class Dequantized:
    """One weight as a shard of its own: what is read from it was codes in the file."""

    stored: Stored
    codes: Shard

    @property
    def path(self) -> Path:
        return self.codes.path

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {self.stored.spec.name: self.stored.plain}

    def offset(self, name: str) -> int:
        return self.codes.offset(self.stored.parts["codes"].spec.name)

    def read(self, name: str) -> Array:
        """Return the whole weight."""
        return self.read_rows(name, 0, self.stored.plain.shape[0])

    def read_rows(self, name: str, begin: int, end: int, out: Array | None = None) -> Array:
        """Return rows of the weight, in `out` where it is given."""
        from bridge.quant.dequantize import weight_rows  # loads numba, which opening a checkpoint must not

        return weight_rows(self.stored, begin, end, out)


def _turned(taken: Taken, config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> Taken:
    """Mark what ModelOpt's exporter turned: it stores a Conv1D, which its architecture has as [in, out], [out, in].

    It turns those that it does not quantize as well, transformers and bridge do not, and a square one does not tell.
    """
    weights = {stored.spec.name: stored.plain for stored in taken.stored.values()}
    try:
        turned = turned_weights(config, {**specs, **weights})
    except BridgeError:
        return taken  # whoever asks for the structure is told what is wrong with the config
    kept = {name: specs[name].shape for name in turned.keys() - weights.keys()}
    unclear = [name for name, shape in kept.items() if shape == turned[name][::-1]]
    problems = [
        f"{name}: not quantized, and not known to be [in, out], as the architecture has it: ModelOpt's exporter stores "
        "it [out, in]; quantize this module too, or give the unquantized model"
        for name in sorted(unclear)
    ]
    stored = {module: dataclasses.replace(of, turned=of.spec.name in turned) for module, of in taken.stored.items()}
    return dataclasses.replace(taken, stored=stored, problems=(*taken.problems, *problems))


def _dtype(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> str:
    """The dtype of the model as it was: what its config says, else what most of its plain values have."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if part.get(key) in FLOATS:
                return str(part[key])
    sizes = dict.fromkeys(FLOATS, 0)
    for name, spec in specs.items():
        if spec.dtype in sizes and name.endswith("weight"):
            sizes[spec.dtype] += spec.size
    return max(sizes, key=lambda name: sizes[name]) if any(sizes.values()) else "bfloat16"


def _taken(root: Path, config: Mapping[str, Any], weights: Weights) -> tuple[Taken, Numeric | None] | None:
    """What the writer that the config names has stored, and how it coded keys and values; None for other writers."""
    sections = [
        holder[key]
        for holder in (config, *config.values())
        if isinstance(holder, Mapping)
        for key in CONFIGS
        if key in holder
    ]
    section = next((part for part in sections if isinstance(part, Mapping)), {})
    own = _modelopt_file(root)
    method = str(section.get("quant_method", "modelopt" if own else ""))
    tensors, dtype = _Tensors(weights), _dtype(config, weights.specs)
    if method == "mxfp4":
        return mxfp4.take(tensors, dtype), None
    readers: dict[str, Callable[[], Reader]] = {
        "modelopt": lambda: modelopt.reader(own or section),
        "fp8": lambda: blocks.reader(section),
        "compressed-tensors": lambda: compressed.reader(section, _shapes(weights)),
    }
    if method not in readers:
        return None
    reader = readers[method]()
    taken = take(reader, tensors, dtype)
    return _turned(taken, config, weights.specs) if method == "modelopt" else taken, reader.kv


def _modelopt_file(root: Path) -> dict[str, Any]:
    try:
        found = load_json(root / MODELOPT_FILE)["quantization"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    """Module -> its `weight_shape`: two numbers that packed codes alone do not tell."""
    suffix = ".weight_shape"
    names = [name for name, spec in weights.specs.items() if name.endswith(suffix) and spec.shape == (2,)]
    return {name.removesuffix(suffix): tuple(int(n) for n in weights.holder[name].read(name)) for name in names}


@dataclass(frozen=True)
class _Tensors:
    """See `bridge.sources.stored.Tensors`."""

    weights: Weights

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.weights.specs

    def read(self, name: str) -> Array:
        return self.weights.holder[name].read(name)

    def read_rows(self, name: str, begin: int, end: int) -> Array:
        return self.weights.holder[name].read_rows(name, begin, end)
