"""What tests of goldens share: small written models, and files of theirs that are changed by one value."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

import bridge
from bridge.core.formats.safetensors import read_header
from bridge.quant.calibration import Calibration, Provenance
from tests.models.sources_made import made_llama

LLAMA = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
Q = "model.layers.1.self_attn.q_proj.weight"


def written(out: Path, target: str = "hf", quant: str | None = "int8_wo", **options: object) -> Path:
    """The tiny Llama, converted without a proof."""
    bridge.convert(LLAMA, target, quant, out, verify=False, **options)
    return out


def converted_made(out: Path, quant: str | Path = "int8_wo", **changes: np.ndarray) -> Path:
    """A random Llama with some tensors replaced, converted."""
    bridge.convert(made_llama(**changes), "hf", quant, out, verify=False)
    return out


def calibration() -> Calibration:
    """Statistics for every matrix of the tiny Llama, made up."""
    plan = bridge.plan(LLAMA, "hf", "fp8")
    modules = [step.site.module for step in plan.quantized if step.site]
    amax = {module: np.array(2.0 + at, np.float32) for at, module in enumerate(modules)}
    return Calibration(
        Provenance("fp8", plan.scheme_digest, plan.architecture, "", "float32", "", 0, 0), input_amax=amax
    )


def changed(out: Path, to: Path, tensor: str, at: int = 0, file: str = "model.safetensors") -> Path:
    """A copy of a written model with one byte of one tensor turned over."""
    shutil.copytree(out, to)
    offset = read_header(to / file).entries[tensor].offset + at
    with (to / file).open("r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)[0]
        handle.seek(offset)
        handle.write(bytes([byte ^ 1]))
    return to
