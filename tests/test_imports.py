"""What starts fast loads nothing heavy. Modules are asserted, not seconds: a clock would fail on a busy machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FRAMEWORKS = {
    "torch", "transformers", "modelopt", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "numba", "datasets",
    "safetensors", "huggingface_hub", "triton",
}  # fmt: skip
MODEL = Path(__file__).parent.parent / "examples" / "models" / "tiny-llama"


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    listing = "\nimport sys, json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), end='')"
    done = subprocess.run([sys.executable, "-c", code + listing], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def command(*words: str) -> str:
    return f"""
from bridge.cli import app
try:
    app({list(words)!r})
except SystemExit as end:
    assert not end.code, end.code
print()
"""


def test_importing_bridge_loads_no_framework_and_no_numpy() -> None:
    assert not loaded("import bridge") & (FRAMEWORKS | {"numpy", "rich", "typer"})


@pytest.mark.parametrize("words", [["--help"], ["convert", "--help"]])
def test_help_loads_no_framework_and_no_numpy(words: list[str]) -> None:
    assert not loaded(command(*words)) & (FRAMEWORKS | {"numpy", "rich"})


@pytest.mark.parametrize("what", ["schemes", "targets", "architectures", "fp8"])
def test_show_loads_no_framework(what: str) -> None:
    assert not loaded(command("show", what)) & FRAMEWORKS


def test_a_plan_of_an_architecture_with_a_table_loads_no_framework() -> None:
    words = ("plan", str(MODEL), "--target", "trt", "--quant", "fp8", "--kv", "fp8")
    assert not loaded(command(*words)) & FRAMEWORKS


def test_the_loader_of_target_tripy_is_there_without_an_import_of_its_own() -> None:
    code = "import bridge; assert callable(bridge.targets.tripy.build) and not hasattr(bridge.targets, 'trippy')"
    assert not loaded(code) & (FRAMEWORKS | {"nvtripy"})


def test_check_of_the_tables_loads_no_framework() -> None:
    assert not loaded("import bridge; bridge.check()") & FRAMEWORKS
