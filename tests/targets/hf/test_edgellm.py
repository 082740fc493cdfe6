"""What TensorRT Edge-LLM's exporter and its builder load of target `hf`: types, and values of weights (`make oracles`).

Their loaders decode; `Rebuilt` decodes what we wrote. Their scales of INT4, of FP8 per tensor and all that stays
unquantized are float16.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import bridge
from bridge.core.dtypes import to_float32
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from bridge.targets.hf.runtime import Rebuilt
from bridge.targets.manifest import load_manifest

ROOT = Path(__file__).parent.parent.parent.parent
TINY = ROOT / "examples" / "models" / "tiny-llama"
EDGELLM = ROOT / ".venv" / "edgellm"
MIXED = """
base = "int4_wo"

[[rule]]
modules = ["*.mlp.*"]
quant = "mxfp8"

[[rule]]
modules = ["*.[qkv]_proj"]
quant = "none"
"""
HALF = 2.0**-10  # of the largest weight: two roundings to float16
PROJECTIONS = 35

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not EDGELLM.is_dir(), reason="needs Edge-LLM: make oracles")]


@dataclass(frozen=True)
class Cell:
    """A scheme in a format, and what each program takes a quantized projection for; or `refuses: ` and its words."""

    scheme: str
    format: str
    exporter: str
    builder: str
    kv: str | None = None

    def __str__(self) -> str:
        return f"{self.scheme}-{self.format}"


CELLS = (
    Cell("fp8", "modelopt", "FP8Linear", "fp8", kv="fp8"),
    Cell("nvfp4", "modelopt", "NVFP4LinearMethod", "nvfp4"),
    Cell("nvfp4_wo", "modelopt", "NVFP4LinearMethod", "nvfp4"),
    Cell("mxfp8", "modelopt", "MXFP8Linear", "mxfp8"),
    Cell("int4_awq", "modelopt", "ModelOptAWQPrepackedLinear", "int4_awq_modelopt"),
    Cell("int8_sq", "modelopt", "INT8SQLinear", "int8_sq"),
    Cell("int4_awq", "awq", "AWQLinear", "int4_awq"),
    Cell("int4_wo", "gptq", "GPTQLinear", "int4_gptq"),
    Cell("fp8_block", "modelopt", "MXFP8Linear", "fp8_block"),
    Cell("nvfp4", "compressed-tensors", "FP16Linear", "nvfp4"),
    Cell("nvfp4_wo", "compressed-tensors", "FP16Linear", "nvfp4"),
    Cell("fp8_pc_pt", "modelopt", "FP8Linear", "refuses: checkpoint tensor not found: '.*input_scale'"),
    Cell("mxfp4_wo", "modelopt", "NVFP4LinearMethod", "refuses: MXFP4 weight layouts are not implemented"),
    Cell("w4a8_awq", "modelopt", "AWQLinear", "refuses: checkpoint tensor not found: '.*qweight'"),
    Cell("w4a8_nvfp4_fp8", "modelopt", "FP8Linear", "nvfp4"),
    Cell("int8_wo", "modelopt", "FP16Linear", "refuses: unsupported checkpoint quantization algorithm 'W8A16'"),
    Cell("fp8", "compressed-tensors", "FP16Linear", "refuses: unsupported compressed-tensors checkpoint format"),
    Cell("fp8_block", "deepseek", "FP16Linear", "refuses: unsupported checkpoint quantization method 'fp8'"),
    Cell("none", "modelopt", "FP16Linear", "fp16"),
)
INPUTS = ("fp8_pc_pt-exporter", "w4a8_nvfp4_fp8-builder")  # weights have their values there, inputs have not
SERVED = [cell for cell in CELLS if cell.scheme != "none"]  # for tests/planning/test_contracts.py
PROGRAMS = {"exporter": "edgellm", "builder": "edgellm-builder"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, dict[str, str]]]]:
    """A folder with checkpoints and what both programs made of each."""
    out = tmp_path_factory.mktemp("edgellm")
    options: dict[str, Any] = {"samples": 4, "sequence": 64, "verify": False, "progress": False}
    for cell in CELLS:
        quant = None if cell.scheme == "none" else cell.scheme
        bridge.convert(TINY, "hf", quant, out / str(cell), format=cell.format, kv=cell.kv, **options)
    (out / "mixed.toml").write_text(MIXED)
    bridge.convert(TINY, "hf", out / "mixed.toml", out / "mixed", **options)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{EDGELLM}", "HF_HUB_OFFLINE": "1"}
    names = [*map(str, CELLS), "mixed"]
    command = [sys.executable, "-m", "tests.oracles.edgellm_process", str(out), *(str(out / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr
    return out, json.loads((out / "results.json").read_text())


def errors(out: Path, name: str, program: str) -> Mapping[str, float]:
    """Module -> the largest difference of what it is worth there and here, of the largest weight."""
    rebuilt = Rebuilt(out / name, load_manifest(out / name).plan)
    found = {}
    with np.load(out / f"{name}.{program}.npz") as arrays:
        for module in (name for name in arrays if not name.endswith("input_scale")):
            weight = f"{module}.weight"
            ours = to_float32(rebuilt.read(weight), rebuilt.specs[weight].dtype)
            found[module] = float(np.abs(arrays[module] - ours).max() / np.abs(ours).max())
    return found


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_program_loads_what_its_contract_says_and_nothing_else(cell: Cell, program: str, loaded: Any) -> None:
    out, results = loaded
    plan = load_manifest(out / str(cell)).plan
    answer, types = verdict(load_runtime(PROGRAMS[program]), plan), results[str(cell)][program]
    expected = getattr(cell, program)
    if expected.startswith("refuses: "):
        assert re.search(expected.removeprefix("refuses: "), types.get("error", "")), types
        assert answer.how == "no" and not answer.mistake
        return
    assert "error" not in types, types
    kinds = [kind for module, kind in types.items() if module not in ("lm_head", "kv")]
    assert kinds == [expected] * PROJECTIONS and str(cell.kv) == types["kv"]
    found = errors(out, str(cell), program)
    equal = len(found) == PROJECTIONS + 1 and all(error < HALF for error in found.values())  # not if one is NaN
    if answer.how == "run" or "out = 64 is not a multiple of 128" in answer.why_not:
        assert equal, found
    else:
        assert equal == (f"{cell.scheme}-{program}" in INPUTS)
        assert answer.mistake


@pytest.mark.parametrize(
    ("program", "kinds"),
    [
        ("exporter", ("FP16Linear", "MXFP8Linear", "ModelOptAWQPrepackedLinear")),
        ("builder", ("fp16", "mxfp8", "int4_awq_modelopt")),
    ],
)
def test_a_recipe_is_loaded_module_by_module(program: str, kinds: tuple[str, ...], loaded: Any) -> None:
    out, results = loaded
    types = results["mixed"][program]
    assert {types[module] for module in types if module.endswith(("q_proj", "k_proj", "v_proj"))} == {kinds[0]}
    assert {types[module] for module in types if ".mlp." in module} == {kinds[1]}
    assert {types[module] for module in types if module.endswith("o_proj")} == {kinds[2]}
    assert max(errors(out, "mixed", program).values()) < HALF
    assert verdict(load_runtime(PROGRAMS[program]), load_manifest(out / "mixed").plan).how == "run"


@pytest.mark.parametrize(("name", "modules"), [("fp8", PROJECTIONS), ("nvfp4", PROJECTIONS), ("int8_sq", PROJECTIONS)])
def test_scales_of_inputs_arrive(name: str, modules: int, loaded: Any) -> None:
    out, _ = loaded
    stored = load_file(out / f"{name}-modelopt" / "model.safetensors")
    with (
        np.load(out / f"{name}-modelopt.builder.npz") as exact,
        np.load(out / f"{name}-modelopt.exporter.npz") as other,
    ):
        names = [name for name in exact if name.endswith("input_scale")]
        assert len(names) == modules == len([name for name in other if name.endswith("input_scale")])
        for one in names:
            assert exact[one] == stored[one].numpy() and abs(other[one] / exact[one] - 1).max() < HALF


@pytest.mark.parametrize(
    "cell", ["nvfp4_wo-modelopt.builder", "nvfp4_wo-modelopt.exporter", "nvfp4_wo-compressed-tensors.builder"]
)
def test_inputs_of_weights_alone_have_a_tensor_scale_of_1(cell: str, loaded: Any) -> None:
    """Both programs quantize them: the contract says so."""
    out, _ = loaded
    with np.load(out / f"{cell}.npz") as arrays:
        scales = [arrays[name] for name in arrays if name.endswith("input_scale")]
    assert len(scales) == PROJECTIONS and all(scale == 1 for scale in scales)
