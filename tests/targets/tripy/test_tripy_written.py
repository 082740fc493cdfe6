"""What target `tripy` wrote: what lint, audit and verification find, and that no machine shows in the bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bridge
from bridge.targets.tripy.lint import audit, lint
from tests.models.export_families import build
from tests.oracles import export_oracle as oracle
from tests.oracles import tripy_oracle as tripy
from tests.targets.tripy.test_tripy import DOWN, made, recipe, seen


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8 with input scales, and one matrix in INT4 [in, out]."""
    root = tmp_path_factory.mktemp("tripy")
    source = made()
    text = 'base = "fp8"\n[[rule]]\nroles = ["mlp.down.weight"]\nquant = "int4_wo"\n'
    tripy.convert(source, recipe(root, text), root / "out", calib=seen(source))
    assert lint(root / "out") == []
    return root / "out"


def damaged(written: Path, out: Path, section: Any = None, **tensors: torch.Tensor | None) -> Path:
    """A copy with other tensors (None: left out; `__` for dots), or another section `tripy`."""
    shutil.copytree(written, out)
    held = load_file(written / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, out / "model.safetensors")
    if section is not None:
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | {"tripy": section(config["tripy"])}))
    return out


def entry_with(module: str, **change: Any) -> Any:
    def changed(section: dict[str, Any]) -> dict[str, Any]:
        modules = section["modules"]
        return section | {"modules": modules | {module: modules[module] | change}}

    return changed


UP = "model.layers.1.mlp.up_proj"
BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"model__norm__weight": torch.ones(128).half()},
        "model.norm.weight: is float16, but a module of float32 takes only float32",
    ),
    ({"lm_head__weight_scale": torch.ones(())}, "lm_head.weight_scale: does not belong to a quantized module"),
    ({f"{UP}.weight_scale": None}, f"{UP}: has no weight matrix with a weight_scale"),
    ({f"{UP}.weight_scale": torch.ones(1)}, f"{UP}: has a weight_scale of shape (1,); Tripy reads ()"),
    (
        {f"{DOWN}.weight_scale": torch.ones(128, 3)},
        f"{DOWN}: has a weight_scale of shape (128, 3); Tripy reads (3, 128)",
    ),
    ({f"{UP}.weight_scale": torch.zeros(())}, f"{UP}: has weight_scale that is not finite and positive"),
    ({f"{UP}.input_scale": torch.tensor(float("nan"))}, f"{UP}: has input_scale that is not finite and positive"),
    ({f"{UP}.input_scale": None}, f"{UP}: lacks input_scale of shape ()"),
    ({"section": entry_with(UP, quant_dtype="int2")}, f"tripy.modules.{UP} has an unknown quant_dtype; Tripy has int8"),
    ({"section": entry_with(UP, weight_quant_dim=1)}, f"tripy.modules.{UP} has a weight_quant_dim that is neither"),
    ({"section": entry_with(UP, block=100)}, f"tripy.modules.{UP} has blocks: Tripy has them for int4 only"),
    ({"section": entry_with(DOWN, block=100)}, f"{DOWN}: has blocks of 100, which do not divide the first axis"),
    ({"section": entry_with(UP, pre_quant_scale=True)}, f"{UP}: lacks pre_quant_scale of shape (128,)"),
    ({"section": entry_with(UP, input_scale=False)}, f"{UP}.input_scale: does not belong to a quantized module"),
    ({"section": lambda section: section | {"format": 2}}, "format 2 of section 'tripy'; this version reads 1"),
    (
        {"section": lambda section: {"format": 1, "dtype": "float32"}},
        "section 'tripy' lacks modules, copies or snapped",
    ),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_lint_finds_what_breaks_the_contract(number: int, written: Path, tmp_path: Path) -> None:
    change, says = BROKEN[number]
    section = change.get("section")
    tensors = {name.replace(".", "__"): tensor for name, tensor in change.items() if name != "section"}
    found = lint(damaged(written, tmp_path / "out", section, **tensors))
    assert says in found[0]


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        (f"{UP}.weight_scale", torch.tensor(3e-3), "weights that are not a code times its weight_scale"),
        (
            f"{DOWN}.weight",
            torch.full((384, 128), 0.3),
            f"{DOWN}: has 49152 of 49152 weights that are not a code times",
        ),
    ],
)
def test_an_audit_finds_values_that_are_no_codes(
    name: str, tensor: torch.Tensor, says: str, written: Path, tmp_path: Path
) -> None:
    out = damaged(written, tmp_path / "out", **{name.replace(".", "__"): tensor})
    assert lint(out) == []
    assert says in audit(out)[0]
    assert audit(written) == []


def test_lint_folds_layers_and_finds_unreadable_files(written: Path, tmp_path: Path) -> None:
    changes = {f"model__layers__{n}__mlp__up_proj__weight_scale": torch.ones(2) for n in range(3)}
    (line,) = lint(damaged(written, tmp_path / "folded", **changes))
    assert line.startswith("error [tripy] model.layers.{0..2}.mlp.up_proj: has a weight_scale")
    cut = damaged(written, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-1])
    assert lint(cut)[0].startswith("error [files]")
    (cut / "config.json").unlink()
    assert lint(cut)[0].startswith("error [files]")


@pytest.mark.parametrize(
    ("name", "at"),
    [
        (f"{DOWN}.weight", 5),
        (f"{UP}.weight", 9),
        (f"{DOWN}.weight_scale", 2),
        (f"{UP}.input_scale", 0),
        ("lm_head.weight", 3),
    ],
)
def test_one_damaged_number_is_found(name: str, at: int, written: Path, tmp_path: Path) -> None:
    assert bridge.verify(written, made()).passed
    tensor = load_file(written / "model.safetensors")[name].clone()
    step = load_file(written / "model.safetensors").get(f"{name}_scale")
    if step is not None:  # one code further, or one of the larger ones of e4m3
        tensor.reshape(-1)[at] += step.reshape(-1)[0] * (32 if step.ndim == 0 else 1)
    else:
        tensor.reshape(-1)[at] *= 1.05
    out = damaged(written, tmp_path / "out", **{name.replace(".", "__"): tensor})
    report = bridge.verify(out, made())
    assert not report.passed
    assert [row.name for row in report.parity.tensors if not row.passed] == [
        name.replace("_scale", "") if "weight" in name else name
    ]


ALONE = """
import sys
import bridge
bridge.convert({model!r}, "tripy", "int4_wo", {out!r}, verify=False, dtype="fp16")
print(sorted({{"torch", "transformers", "modelopt", "nvtripy", "safetensors"}} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_scheme_without_calibration_loads_no_framework(tmp_path: Path) -> None:
    directory = oracle.save(build("llama"), tmp_path / "source")
    code = ALONE.format(model=str(directory), out=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["[]"]), done.stderr


@pytest.mark.parametrize("quant", ["int8_wo", "int4_wo"])
def test_the_bytes_do_not_depend_on_threads_or_memory(
    quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for cores, memory in ((1, None), (5, 96 << 20)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        out = tmp_path / str(cores)
        bridge.convert(made(dtype="bfloat16"), "tripy", quant, out, memory=memory, dtype="fp16", verify=False)
        found.add((out / "model.safetensors").read_bytes())
    assert len(found) == 1
