"""What SGLang makes of target `hf`: its own configs, layers, models and loaders, on a CPU (`make oracles`).

Its kernels are replaced: weights are held to 2e-5 in the logits, inputs stay unrounded. A new spelling or scheme is a
row of CELLS.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bridge
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from bridge.quant.calibration import Calibration, Provenance
from bridge.quant.schemes.scheme import Scheme
from bridge.targets.hf.runtime import Runtime
from bridge.targets.manifest import load_manifest
from tests.covering import grid
from tests.models import own_schemes
from tests.models.export_families import tokens
from tests.oracles import export_oracle, sglang_oracle
from tests.oracles.vllm_oracle import Answer

pytestmark = pytest.mark.slow  # the process takes ten seconds of a core to import SGLang
IDS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(7))
FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3", "mixtral")
ROUNDING = 2e-5  # float32 products of the same values in another order
OF_A_SCHEME = "ModelOptFp8Config only supports regular FP8 quantization"
NO_SCHEME = "No compressed-tensors compatible scheme was found"


@dataclass(frozen=True)
class Cell:
    """A scheme in a format, and how SGLang refuses it: any model, or one with experts."""

    scheme: str | Scheme
    format: str = "modelopt"
    refused: str = ""
    experts: str = ""

    def __str__(self) -> str:
        return f"{self.scheme if isinstance(self.scheme, str) else self.scheme.name}-{self.format}"

    def refusal(self, family: str) -> str:
        return self.refused or (self.experts if family == "mixtral" else "")


OF_BLACKWELL = "Current platform does not support NVFP4"  # it asks the GPU itself; of ModelOpt's experts it does not
CELLS = (
    Cell("fp8"),
    Cell("fp8", "compressed-tensors"),
    Cell("fp8_pc_pt", "compressed-tensors"),
    Cell("fp8_block_dynamic", "compressed-tensors"),
    Cell("int8_pc_pt", "compressed-tensors", experts="implemented only for NPU"),
    Cell("nvfp4"),
    Cell("nvfp4_awq"),
    Cell("nvfp4_awq", "compressed-tensors", experts=OF_BLACKWELL),
    Cell("nvfp4", "compressed-tensors", experts=OF_BLACKWELL),
    Cell("nvfp4_wo"),
    Cell("nvfp4_wo", "compressed-tensors"),
    Cell("int8_wo", "compressed-tensors"),
    Cell("int4_wo", "compressed-tensors"),
    Cell("int4_awq", "compressed-tensors"),
    *(Cell(scheme, format_) for scheme in ("int4_wo", "int4_awq") for format_ in ("awq", "gptq")),
    Cell("fp8_pc_pt", refused=OF_A_SCHEME),
    Cell("fp8_block", refused=OF_A_SCHEME),
    *(Cell(s, refused=OF_A_SCHEME) for s in ("int8", "int8_sq", "int8_wo", "int4_wo", "int4_awq", "w4a8_awq")),
    Cell("mxfp4_wo", refused="ModelOpt currently only supports: FP8, NVFP4"),
    *(Cell(s, "compressed-tensors", refused=NO_SCHEME) for s in ("fp8_block", "mxfp8", "mxfp4", "mxfp4_wo")),
    Cell("w4a8_fp8", "compressed-tensors", refused=NO_SCHEME),
    # One input scale has one element, and the second of the fused matrices none.
    *(Cell(s, "compressed-tensors", refused="index 1 is out of bounds") for s in ("int8", "int8_sq")),
)
CELLS += (  # schemes of one's own
    *(Cell(own, "compressed-tensors") for own in (*own_schemes.INT4, *own_schemes.INT8)),
    *(Cell(own, "gptq") for own in own_schemes.INT4),
    *(Cell(own, "awq") for own in own_schemes.INT4[1:]),
    *(Cell(own, "compressed-tensors", experts="'num_bits'") for own in (own_schemes.CHANNELS, own_schemes.TENSORS)),
    *(Cell(own, "compressed-tensors", experts="^AssertionError") for own in (own_schemes.STATIC, own_schemes.TOKENS)),
)
SERVED = [cell for cell in CELLS if not cell.refused]
REFUSED = [cell for cell in CELLS if cell.refused]
DEEPSEEK, MXFP8 = [Cell(scheme, "deepseek") for scheme in ("fp8_block", "fp8_block_dynamic")], Cell("mxfp8")


@pytest.fixture(autouse=True)
def environment() -> None:
    sglang_oracle.require()


@functools.cache
def calibration(family: str) -> Calibration:
    """An input amax for every module: modules of one parent have one input, and SGLang wants one scale of it."""
    plan = bridge.plan(export_oracle.source(family, "fp32"), "hf", "fp8")
    modules = [step.site.module for step in plan.quantized if step.site]
    parents = {module: module.rpartition(".")[0] for module in modules}
    amax = {module: np.array(3.0 + len(parent) / 16, np.float32) for module, parent in parents.items()}
    return Calibration(Provenance("", "", "", "", "", "", 0, 0), amax)


def write(family: str, cell: Cell, out: Path, **options: Any) -> Path:
    """The checkpoint that SGLang gets, from float32 weights, so that nothing but the scheme rounds."""
    calib: Any = calibration(family) if cell.scheme in ("fp8", "nvfp4", own_schemes.STATIC) else None
    if cell.scheme in ("int4_awq", "int8", "int8_sq", "nvfp4_awq", "w4a8_awq"):
        calib = [*tokens(), tokens()[0]]  # the last is held out
    options |= {"format": cell.format, "verify": False, "progress": False}
    bridge.convert(export_oracle.source(family, "fp32"), "hf", cell.scheme, out, calib=calib, **options)
    return out


def ask(family: str, directory: Path, kv: str = "auto") -> Answer:
    """Experts are loaded, and have no kernel here."""
    return sglang_oracle.ask(directory, IDS.tolist(), load_only=family == "mixtral", kv=kv)


def off(directory: Path, answer: Answer) -> float:
    """The largest difference from the logits of our dequantized weights."""
    return float(np.abs(answer.logits - Runtime(directory).run({"input_ids": IDS[None].numpy()})["output 0"][0]).max())


def missing(cell: Cell, answer: Answer) -> list[str]:
    """SGLang's experts have GPTQ's order of inputs for compressed-tensors too, which has none.

    A pre-scale that went into a norm or the matrix before stays at SGLang's ones.
    """
    names = answer.missing(weight_only=cell.scheme == "nvfp4_wo")
    return [name for name in names if not name.endswith(("_g_idx", "_g_idx_sort_indices", "pre_quant_scale"))]


@grid(
    {"family": FAMILIES, "cell": SERVED},
    valid=lambda family, cell: not cell.refusal(family),
    first=[("llama", SERVED[0]), ("mixtral", SERVED[1])],
)
def test_sglang_reads_every_tensor_and_gives_the_logits(family: str, cell: Cell, tmp_path: Path) -> None:
    directory = write(family, cell, tmp_path / "out")
    answer = ask(family, directory)
    assert (answer.error, answer.unread, missing(cell, answer)) == ("", (), [])
    if family != "mixtral":
        assert off(directory, answer) <= ROUNDING


def refused() -> list[Any]:
    """Those whose calibration takes seconds are asked at night."""
    night = ("int4_awq", "int8", "int8_sq", "w4a8_awq")
    return [pytest.param(cell, marks=pytest.mark.product if cell.scheme in night else ()) for cell in REFUSED]


@pytest.mark.parametrize("cell", refused(), ids=str)
def test_sglang_refuses_what_we_say_it_refuses(cell: Cell, tmp_path: Path) -> None:
    directory = write("llama", cell, tmp_path / "out")
    assert re.search(cell.refused, ask("llama", directory).error)
    plan = bridge.plan(export_oracle.source("llama", "fp32"), "hf", cell.scheme, format=cell.format)
    assert verdict(load_runtime("sglang"), plan).how == "no"


KEPT = '[[rule]]\nmodules = ["*.mlp.*"]\nquant = "none"\n'
# awq.py:61 asks for the fused name among the modules that stay; what vLLM's models say of their parts, SGLang's do not.
LOST = {
    ("int8_wo", "compressed-tensors"): True,
    ("nvfp4_wo", "modelopt"): False,
    ("int4_wo", "awq"): True,
    ("int4_wo", "gptq"): True,
}


@pytest.mark.parametrize(
    ("cell", "lost"),
    [
        pytest.param(Cell(*cell), lost, marks=pytest.mark.product if "int4_wo" in cell else (), id="-".join(cell))
        for cell, lost in LOST.items()
    ],
)
def test_what_a_recipe_keeps_of_fused_modules_is_read_as_the_contract_says(
    cell: Cell, lost: bool, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'base = "{cell.scheme}"\n{KEPT}')
    directory = write("llama", Cell(str(recipe), cell.format), tmp_path / "out")
    answer = ask("llama", directory)
    assert answer.error == "" and bool(answer.unread) == lost
    assert verdict(load_runtime("sglang"), load_manifest(directory).plan).how == ("no" if lost else "run")


@pytest.mark.parametrize("format_", ["modelopt", "compressed-tensors"])
def test_requantize_with_max_scale_changes_no_code(format_: str, tmp_path: Path) -> None:
    """SGLang's own function, at whose end only the weights of our shared scales are those of the file."""
    cell = Cell("fp8", format_)
    answer = ask("llama", write("llama", cell, tmp_path / "out"))
    assert answer.error == "" and len(answer.changed) == 8
    assert sum(answer.changed.values()) == 0
    own = ask("llama", write("llama", cell, tmp_path / "own", own_scales=True))
    assert sum(own.changed.values()) > 400_000, "of 917,504, where q, k and v have a scale each"


@pytest.mark.parametrize("cell", DEEPSEEK, ids=str)
def test_tiles_are_read_by_qwen3_and_lost_by_llama(cell: Cell, tmp_path: Path) -> None:
    """models/llama.py renames `weight_scale_inv`, finds no such parameter and goes on with a warning."""
    directory = write("qwen3", cell, tmp_path / "qwen3")
    answer = ask("qwen3", directory)
    assert (answer.error, answer.unread, answer.missing()) == ("", (), [])
    assert off(directory, answer) <= ROUNDING
    lost = ask("llama", write("llama", cell, tmp_path / "llama"))
    assert len(lost.unread) == 14 and all(name.endswith("weight_scale_inv") for name in lost.unread)
    for family, how in (("qwen3", "run"), ("llama", "no")):
        plan = bridge.plan(export_oracle.source(family, "fp32"), "hf", cell.scheme, format="deepseek")
        assert verdict(load_runtime("sglang"), plan).how == how


def test_the_scales_of_mxfp8_have_another_name_than_sglang_looks_for(tmp_path: Path) -> None:
    assert "gate_up_proj.weight_scale'" in ask("qwen3", write("qwen3", MXFP8, tmp_path / "qwen3")).error
    lost = ask("llama", write("llama", MXFP8, tmp_path / "llama"))
    assert len(lost.unread) == 14 and all(name.endswith("weight_scale") for name in lost.unread)
    assert (
        verdict(load_runtime("sglang"), bridge.plan(export_oracle.source("qwen3", "fp32"), "hf", "mxfp8")).how == "no"
    )


@pytest.mark.parametrize(("family", "lost"), [("llama", 0), ("qwen3", 4)])
def test_scales_of_an_fp8_cache_are_read_and_passed_over_by_qwen3(family: str, lost: int, tmp_path: Path) -> None:
    """SGLang's Qwen3 makes no parameters for them: its cache has the scale 1, whatever a file says."""
    source, calib = export_oracle.source(family, "fp32"), [*tokens(), tokens()[0]]
    bridge.convert(source, "hf", "fp8", tmp_path / "out", calib=calib, kv="fp8", verify=False, progress=False)
    answer = ask(family, tmp_path / "out", kv="fp8_e4m3")
    assert (answer.error, answer.missing(kv=True), len(answer.unread)) == ("", [], lost)
    assert all(name.endswith((".k_scale", ".v_scale")) for name in answer.unread)


def test_the_oracle_sees_a_code_that_is_another_and_a_tensor_that_lacks(tmp_path: Path) -> None:
    directory = write("llama", Cell("int8_wo", "compressed-tensors"), tmp_path / "out")
    path, name = directory / "model.safetensors", "model.layers.0.mlp.down_proj.weight_packed"
    tensors = load_file(path)
    reference = Runtime(directory).run({"input_ids": IDS[None].numpy()})["output 0"][0]
    store(tensors | {name: tensors[name] ^ 0x40}, path)
    assert np.abs(ask("llama", directory).logits - reference).max() > ROUNDING
    del tensors["model.layers.1.mlp.down_proj.weight_scale"]
    store(tensors | {"model.layers.0.mlp.down_proj.pre_quant_scale": torch.ones(384)}, path)
    answer = ask("llama", directory)
    assert answer.unread == ("model.layers.0.mlp.down_proj.pre_quant_scale",)
    assert answer.missing() == ["model.layers.1.mlp.down_proj.weight_scale"]


def store(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
