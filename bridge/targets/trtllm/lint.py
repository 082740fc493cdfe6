"""Hold a written directory to the contract of TensorRT-LLM's checkpoints, from its files alone; never trusts the plan.

The contract is what `tensorrt_llm.models.modeling_utils` up to 1.2 reads: one file a rank, the fields without which no
model is built, and beside each quantized matrix the factors that its algorithm needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from bridge.container import SafetensorsFile
from bridge.errors import SourceError, fold_layers
from bridge.values import TensorSpec

REQUIRED = (
    "architecture", "dtype", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
)  # fmt: skip
# The keys of `quantization` that QuantConfig knows; any other one is a TypeError there.
KNOWN = ("quant_algo", "kv_cache_quant_algo", "group_size", "has_zero_point", "pre_quant_scale", "exclude_modules")
MATRICES = ("qkv", "dense", "fc", "gate", "proj")
SCALE, SECOND, INPUT, PRE = (
    "weights_scaling_factor", "weights_scaling_factor_2", "activation_scaling_factor", "prequant_scaling_factor",
)  # fmt: skip
# Algorithm -> dtype of the codes, the factors that must be there.
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
    """What breaks the contract, one message a finding, layers folded; [] if nothing does."""
    try:
        config = json.loads((directory / "config.json").read_text())
        ranks = {path.name: SafetensorsFile(path) for path in directory.glob("rank*.safetensors")}
    except (OSError, ValueError, SourceError) as error:
        return [f"error [files] {error}"]
    findings = [f"error [config] config.json has no {key}" for key in REQUIRED if key not in config]
    quantization = config.get("quantization") or {}
    findings += [f"error [config] quantization.{key} is unknown there" for key in quantization if key not in KNOWN]
    world = (config.get("mapping") or {}).get("world_size", 1)
    wanted = {f"rank{number}.safetensors" for number in range(world)}
    if set(ranks) != wanted:
        findings.append(f"error [ranks] world_size is {world}, the files are {', '.join(sorted(ranks)) or 'none'}")
    for name, file in sorted(ranks.items()):
        findings += [f"error [{name}] {said}" for said in _rank(file, quantization, directory)]
    return findings


def _rank(file: SafetensorsFile, quantization: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """What one rank lacks, or holds in another dtype than its algorithm says."""
    layers = {}
    if (directory / "quant_cfg.json").is_file():
        layers = json.loads((directory / "quant_cfg.json").read_text()).get("quantized_layers", {})
    wrong: dict[str, list[str]] = {}
    for name in file.specs:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.rpartition(".")[2] in MATRICES:
            for said in _matrix(module, file.specs, _algorithm(module, quantization, layers)):
                wrong.setdefault(said, []).append(module)
        if leaf.endswith(("scaling_factor", "scaling_factor_2", "scale")) and (said := _bad(file, name)):
            wrong.setdefault(said, []).append(name)
    for said, modules in wrong.items():
        yield f"{', '.join(fold_layers(modules))}: {said}"


def _algorithm(module: str, quantization: Mapping[str, Any], layers: Mapping[str, Any]) -> str | None:
    if layers:
        return (layers.get(module) or {}).get("quant_algo")
    excluded = any(fnmatchcase(module, pattern) for pattern in quantization.get("exclude_modules") or ())
    return None if excluded else quantization.get("quant_algo")


def _matrix(module: str, specs: Mapping[str, TensorSpec], algorithm: str | None) -> Iterator[str]:
    weight = specs[f"{module}.weight"]
    if algorithm is None:
        if weight.dtype not in ("float16", "bfloat16", "float32"):
            yield f"holds {weight.dtype}, and config.json says that it is not quantized"
        return
    if algorithm not in RULES:
        yield f"no rule is known for {algorithm}"
        return
    codes, factors = RULES[algorithm]
    if weight.dtype != codes:
        yield f"{algorithm} has weights in {codes}, not {weight.dtype}"
    for factor in factors:
        if f"{module}.{factor}" not in specs:
            yield f"{algorithm} needs {factor}"


def _bad(file: SafetensorsFile, name: str) -> str:
    """Why a factor cannot be used ("" if it can); those of 8 bits are codes of their own."""
    spec = file.specs[name]
    if spec.dtype != "float32":
        return ""
    values = file.read(name)
    return "" if np.isfinite(values).all() and (values > 0).all() else "holds a value that is not finite and positive"
