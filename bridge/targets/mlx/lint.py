"""Check a written MLX checkpoint against what mlx-lm's loader asks of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.values import TensorSpec


def lint(directory: Path) -> list[str]:
    """Return a message for each violation."""
    try:
        config = json.loads((directory / "config.json").read_text())
        files = [SafetensorsFile(path) for path in sorted(directory.glob("model*.safetensors"))]
    except (SourceError, OSError, ValueError) as error:
        return [f"error [files] {error}"]
    specs = {name: spec for file in files for name, spec in file.specs.items()}
    return [f"error [mlx] {text}" for text in (*_config(config, specs), *_modules(config, specs))]


def _config(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    quantized = any(name.endswith(".scales") for name in specs)
    if quantized != bool(config.get("quantization")):
        yield f"config.json has {'no' if quantized else 'a'} `quantization`, by which mlx-lm reads codes"
    if config.get("quantization") != config.get("quantization_config"):
        yield "quantization and quantization_config of config.json differ; mlx-lm writes one value for both"
    if config.get("tie_word_embeddings") and "lm_head.weight" in specs:
        yield "lm_head.weight is stored, and tie_word_embeddings is true: mlx-lm drops it"


def _modules(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    quantization = config.get("quantization") or {}
    for name in (name for name in specs if name.endswith(".scales")):
        module = name.removesuffix(".scales")
        entry = quantization.get(module, quantization)
        weight, bits, group = specs.get(f"{module}.weight"), entry.get("bits"), entry.get("group_size")
        if weight is None or not isinstance(bits, int) or not isinstance(group, int):
            yield f"{module} has scales, and no weight or no entry of `quantization`"
            continue
        if weight.dtype != "uint32" or weight.shape[-1] * 32 != specs[name].shape[-1] * group * bits:
            yield f"{module}.weight is {weight.dtype} {weight.shape}, not {bits}-bit codes in groups of {group}"
        mode, has = entry.get("mode", "affine"), f"{module}.biases" in specs
        if has != (mode == "affine"):
            yield f"{module} is {mode}, and {module}.biases is {'there' if has else 'missing'}"
