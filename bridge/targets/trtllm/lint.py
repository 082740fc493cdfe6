"""Check a written directory against the contract of TensorRT-LLM's checkpoints.

Only its files are read. The contract is what `tensorrt_llm.models.modeling_utils` up to 1.2 reads: one file per rank,
the fields that it needs to build a model, and for each quantized matrix the factors of its algorithm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import SourceError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.text import fold_problems
from bridge.core.values import TensorSpec

REQUIRED = (
    "architecture", "dtype", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
)  # fmt: skip
# The keys of `quantization` that QuantConfig accepts; any other key is a TypeError there.
KNOWN = ("quant_algo", "kv_cache_quant_algo", "group_size", "has_zero_point", "pre_quant_scale", "exclude_modules")
MATRICES = ("qkv", "dense", "fc", "gate", "proj")
SCALE, SECOND, INPUT, PRE = (
    "weights_scaling_factor", "weights_scaling_factor_2", "activation_scaling_factor", "prequant_scaling_factor",
)  # fmt: skip
# Algorithm -> dtype of the codes, required factors
RULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "FP8":                       ("float8_e4m3fn", (SCALE, INPUT)),
    "FP8_PER_CHANNEL_PER_TOKEN": ("float8_e4m3fn", ("per_channel_scale",)),
    "fp8_pb_wo":                 ("float8_e4m3fn", (SCALE,)),
    "W8A8_SQ_PER_CHANNEL":       ("int8", (SCALE, INPUT)),
    "W8A16":                     ("int8", (SCALE,)),
    "W4A16_AWQ":                 ("int8", (SCALE,)),
    "W4A8_AWQ":                  ("int8", (SCALE, SECOND, INPUT)),
    "W4A16_NVFP4":               ("uint8", (SCALE, SECOND)),
    "NVFP4":                     ("uint8", (SCALE, SECOND, INPUT)),
    "MXFP8":                     ("float8_e4m3fn", (SCALE,)),
}  # fmt: skip


def lint(directory: Path) -> list[str]:
    """Return a message for each violation of the contract, with layers folded."""
    try:
        config = json.loads((directory / "config.json").read_text())
        ranks = {path.name: SafetensorsFile(path) for path in directory.glob("rank*.safetensors")}
    except (OSError, ValueError, SourceError) as error:
        return [f"error [files] {error}"]
    findings = [f"error [config] config.json has no {key}" for key in REQUIRED if key not in config]
    quantization = config.get("quantization") or {}
    findings += [
        f"error [config] quantization.{key} is unknown to TensorRT-LLM" for key in quantization if key not in KNOWN
    ]
    world = (config.get("mapping") or {}).get("world_size", 1)
    expected = {f"rank{number}.safetensors" for number in range(world)}
    if set(ranks) != expected:
        findings.append(f"error [ranks] world_size is {world}, but the files are {', '.join(sorted(ranks)) or 'none'}")
    for name, file in sorted(ranks.items()):
        findings += [f"error [{name}] {line}" for line in fold_problems(_rank(file, quantization, directory))]
    return findings


def _rank(file: SafetensorsFile, quantization: Mapping[str, Any], directory: Path) -> Iterator[tuple[str, str]]:
    layers = {}
    if (directory / "quant_cfg.json").is_file():
        layers = json.loads((directory / "quant_cfg.json").read_text()).get("quantized_layers", {})
    for name in file.specs:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.rpartition(".")[2] in MATRICES:
            for problem in _matrix(module, file.specs, _algorithm(module, quantization, layers)):
                yield module, problem
        if leaf.endswith(("scaling_factor", "scaling_factor_2", "scale")) and (problem := _bad(file, name)):
            yield name, problem


def _algorithm(module: str, quantization: Mapping[str, Any], layers: Mapping[str, Any]) -> str | None:
    if layers:
        return (layers.get(module) or {}).get("quant_algo")
    excluded = any(fnmatchcase(module, pattern) for pattern in quantization.get("exclude_modules") or ())
    return None if excluded else quantization.get("quant_algo")


def _matrix(module: str, specs: Mapping[str, TensorSpec], algorithm: str | None) -> Iterator[str]:
    weight = specs[f"{module}.weight"]
    if algorithm is None:
        if weight.dtype not in ("float16", "bfloat16", "float32"):
            yield f"has dtype {weight.dtype}, but config.json says that it is not quantized"
        return
    if algorithm not in RULES:
        yield f"unknown algorithm {algorithm}"
        return
    codes, factors = RULES[algorithm]
    if weight.dtype != codes:
        yield f"{algorithm} has weights in {codes}, not {weight.dtype}"
    for factor in factors:
        if f"{module}.{factor}" not in specs:
            yield f"{algorithm} needs {factor}"


def _bad(file: SafetensorsFile, name: str) -> str:
    """Why a factor cannot be used ("" if it can); factors of 8 bits are codes themselves and not checked."""
    spec = file.specs[name]
    if spec.dtype != "float32":
        return ""
    values = file.read(name)
    return "" if np.isfinite(values).all() and (values > 0).all() else "has a value that is not finite and positive"
