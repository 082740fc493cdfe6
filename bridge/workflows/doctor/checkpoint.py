"""Open a checkpoint as others wrote it, whatever is wrong with it.

Only headers and JSON are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.core.errors import BridgeError, SourceError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.parsing.limited import load_json
from bridge.core.text import grouped, natural
from bridge.core.values import TensorSpec
from bridge.planning.contract_files import load_runtime
from bridge.sources.config_json import read_json
from bridge.sources.configs.diffusion import is_diffusion
from bridge.sources.quantized.checkpoint import dequantized
from bridge.sources.quantized.fields import MODELOPT_FILE, sections
from bridge.sources.quantized.parts import QuantizedTensors, QuantizedWeight
from bridge.sources.weights.shards import Weights

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# components of names that wrappers of a trainer leave: torch.compile, FSDP, activation checkpoints
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
BEFORE = ("module.", "base_model.model.")  # DDP and DeepSpeed, PEFT
OTHERS = ("adapter", "consolidated")  # how files of other checkpoints in the same directory begin
PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}  # of AutoRound -> whose tensors those are
_NUMBERED = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class Renamed:
    """A tensor of a file under another name; see `bridge.sources.weights.shards.Shard`."""

    file: SafetensorsFile
    stored: str

    @property
    def path(self) -> Path:
        return self.file.path

    def offset(self, name: str) -> int:
        return self.file.offset(self.stored)

    def read(self, name: str) -> Any:
        return self.file.read(self.stored)

    def read_rows(self, name: str, begin: int, end: int, out: Any = None) -> Any:
        return self.file.read_rows(self.stored, begin, end, out)


@dataclass(frozen=True)
class Checkpoint:
    """A directory of safetensors with config.json. Tensors have their names without what wrappers put around them.

    `files`: those that programs read. `stored`: name -> the name in its file. `twice`: names that several files have,
    or that several tensors would get. `index`: that of the directory, None without one.
    """

    directory: Path
    config: dict[str, Any]
    files: dict[str, SafetensorsFile]
    stored: dict[str, str]
    weights: Weights
    twice: tuple[str, ...] = ()
    index: dict[str, Any] | None = None
    modelopt: dict[str, Any] | None = field(default=None)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.weights.specs

    @cached_property
    def section(self) -> Mapping[str, Any]:
        """What config.json says of quantization, or hf_quant_config.json; {} if nothing does."""
        inner = (self.modelopt or {}).get("quantization")
        own = {"quant_method": "modelopt", **inner} if isinstance(inner, Mapping) else {}
        return next(sections(self.config), own)

    @property
    def placed(self) -> Mapping[str, str]:
        """What the index says: tensor -> file."""
        return _placed(self.index)

    @property
    def method(self) -> str:
        return str(self.section.get("quant_method", ""))

    @cached_property
    def tensors(self) -> QuantizedTensors:
        """The quantized modules, and what does not fit together; none of a kind that is not known."""
        config, section = self.config, self.config.get("quantization_config")
        method = PACKINGS.get(str(section.get("packing_format"))) if isinstance(section, dict) else None
        if section and method and not _is_mixed(section.get("extra_config")):
            config = config | {"quantization_config": section | {"quant_method": method}}
        try:
            result = dequantized(self.directory, config, self.weights)
        except BridgeError as error:
            return QuantizedTensors(problems=(str(error),))
        return result.tensors if result else QuantizedTensors()

    @property
    def modules(self) -> Mapping[str, QuantizedWeight]:
        return self.tensors.stored

    def fused(self) -> Iterator[list[QuantizedWeight]]:
        """Quantized modules of one format that a server holds as one matrix: q, k and v, or gate and up."""
        groups = [words for name in ("vllm", "sglang") for words in load_runtime(name).fused]
        group_of = {word: group for group in reversed(groups) for word in group}
        known = [module for module in self.modules if module.rpartition(".")[2] in group_of]
        for names in grouped(known, lambda m: (m.rpartition(".")[0], group_of[m.rpartition(".")[2]])):
            for alike in grouped(names, lambda m: self.modules[m].format.weight):
                if len(alike) > 1:
                    yield [self.modules[module] for module in alike]


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory has config.json and weights in safetensors."""
    own = (directory / INDEX).is_file() or not all(name.startswith(OTHERS) for name in safetensors(directory))
    return own and (directory / "config.json").is_file() and bool(safetensors(directory))


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a directory; SourceError if a file cannot be read, or the model is one of diffusers."""
    config = read_json(directory / "config.json")
    if is_diffusion(config):
        raise SourceError(f"{directory}: a model of diffusers, which is not looked through")
    index = read_json(directory / INDEX) if (directory / INDEX).is_file() else None
    files = {name: SafetensorsFile(directory / name) for name in _read(directory, index)}
    every = [(name, file) for file in files.values() for name in file.specs]
    placed = _placed(index)
    every.sort(key=lambda row: placed.get(row[0]) == row[1].path.name)  # the last one of a name counts
    plain = [(unwrapped(name), name, file) for name, file in every]
    names = {name for name, _, _ in plain}
    if len(names) < len({name for name, _ in every}):  # two tensors would have one name
        plain = [(name, name, file) for name, file in every]
    seen: set[str] = set()
    twice = tuple(name for name, _, _ in plain if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    ordered = sorted(plain, key=lambda row: natural(row[0]))
    specs = {name: TensorSpec(name, file.specs[own].shape, file.specs[own].dtype) for name, own, file in ordered}
    holder = {name: file if name == own else Renamed(file, own) for name, own, file in ordered}
    weights = Weights(specs, dict(holder), tuple(file.path for file in files.values()))
    stored = {name: own for name, own, _ in ordered}
    return Checkpoint(directory, config, files, stored, weights, twice, index, _json(directory / MODELOPT_FILE))


def unwrapped(name: str) -> str:
    """A name without what wrappers of trainers put into it.

    >>> unwrapped("module._orig_mod.model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    plain = ".".join(word for word in name.split(".") if word not in WRAPPERS)
    while before := next((word for word in BEFORE if plain.startswith(word)), ""):
        plain = plain.removeprefix(before)
    return plain


def safetensors(directory: Path) -> list[str]:
    """The names of all files of safetensors in a directory."""
    return sorted(path.name for path in directory.glob("*.safetensors") if path.is_file())


def weight_files(directory: Path) -> list[str]:
    """The names of the weight files of a directory, whatever is wrong with its index."""
    return _read(directory, _json(directory / INDEX))


def _read(directory: Path, index: dict[str, Any] | None) -> list[str]:
    """The weight files: those that the index names, else those that transformers reads, else all of no other model."""
    every, named = safetensors(directory), {*_placed(index).values()}
    if own := [name for name in every if name in named]:
        return own
    own = [SINGLE] if SINGLE in every else [name for name in every if _NUMBERED.fullmatch(name)]
    return own or [name for name in every if not name.startswith(OTHERS)]


def _placed(index: dict[str, Any] | None) -> Mapping[str, str]:
    weight_map = (index or {}).get("weight_map")
    return {k: str(file) for k, file in weight_map.items()} if isinstance(weight_map, dict) else {}


def _is_mixed(extra: Any) -> bool:
    """Whether entries of AutoRound give modules other bits or groups; those of 16 bits have no codes."""
    rows = [row for row in extra.values() if isinstance(row, Mapping)] if isinstance(extra, Mapping) else []
    return any(row.get("bits") != 16 for row in rows)


def _json(file: Path) -> dict[str, Any] | None:
    try:
        content = load_json(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
