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
    return {name.partition(".")[0] for name in modules(code)}


def modules(code: str) -> list[str]:
    """All modules that a fresh interpreter holds after `code`."""
    listing = "\nimport sys, json; print(json.dumps(sorted(sys.modules)), end='')"
    done = subprocess.run([sys.executable, "-c", code + listing], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def command(*words: str) -> str:
    return f"""
from bridge.cli.main import app
try:
    app({list(words)!r})
except SystemExit as end:
    assert not end.code, end.code
print()
"""


def test_importing_bridge_loads_no_framework_and_no_numpy() -> None:
    assert not loaded("import bridge") & (FRAMEWORKS | {"numpy", "rich", "click"})


def test_nothing_is_loaded_before_signals_are_handled() -> None:
    code = "import sys; before = {*sys.modules}; import bridge.__main__; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["__future__", "bridge", "bridge.__main__"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["convert", "--help"]])
def test_help_loads_no_framework_and_no_numpy(words: list[str]) -> None:
    assert not loaded(command(*words)) & (FRAMEWORKS | {"numpy", "rich"})


@pytest.mark.slow
@pytest.mark.parametrize("what", ["schemes", "targets", "architectures", "fp8"])
def test_show_loads_no_framework(what: str) -> None:
    assert not loaded(command("show", what)) & FRAMEWORKS


@pytest.mark.slow
@pytest.mark.parametrize("words", ["trt --quant fp8 --kv fp8", "hf --quant nvfp4_wo", "gguf --quant q8_0"])
def test_a_plan_of_an_architecture_with_a_table_loads_no_framework_and_no_numpy(words: str) -> None:
    assert not loaded(command("plan", str(MODEL), "--target", *words.split())) & (FRAMEWORKS | {"numpy"})


def test_the_loader_of_target_tripy_is_there_without_an_import_of_its_own() -> None:
    code = "import bridge; assert callable(bridge.targets.tripy.build) and not hasattr(bridge.targets, 'trippy')"
    assert not loaded(code) & (FRAMEWORKS | {"nvtripy"})


@pytest.mark.slow
def test_the_tracker_is_there_without_an_import_of_its_own_and_loads_torch_when_it_is_used() -> None:
    assert not loaded("import bridge; assert 'ModTracker' in bridge.tracker.__all__") & FRAMEWORKS
    assert "torch" in loaded("import bridge; bridge.tracker.ModTracker()")


@pytest.mark.slow
def test_check_of_the_tables_loads_no_framework() -> None:
    assert not loaded("import bridge; bridge.check()") & FRAMEWORKS


@pytest.mark.slow
def test_a_config_of_inspect_is_read_without_a_framework() -> None:
    code = "from bridge.workflows.inspect import layers; from bridge.workflows.inspect.te import resolve"
    read = "from bridge.workflows.inspect.te.read import read_config; read_config(None)"
    assert not loaded(f"{code}\n{read}") & FRAMEWORKS


@pytest.mark.slow
def test_a_conversion_loads_no_reader_of_checkpoints_that_it_does_not_read(tmp_path: Path) -> None:
    """They cost a tenth of what a small conversion takes."""
    words = ("convert", str(MODEL), "--target", "hf", "--quant", "nvfp4_input_scale1", "--kv", "fp8_cast")
    found = modules(command(*words, "--out", str(tmp_path / "out")))
    assert not {name.partition(".")[0] for name in found} & {"torch", "transformers", "modelopt"}
    assert "bridge.streaming.run" in found
    foreign = (
        "bridge.core.formats.dcp_",
        "bridge.core.formats.pickle_writer",
        "bridge.sources.dialects.tensors",
        "bridge.sources.weights.dcp",
        "bridge.core.files.archive",
    )
    assert [name for name in found if name.startswith(foreign)] == []
