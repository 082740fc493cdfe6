"""Traced structures that are kept: torch runs once a checkpoint, and nothing wrong is ever believed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bridge
from bridge.core.output import provenance
from bridge.planning.structure import load_traced, store_traced
from bridge.planning.trace import trace_structure
from bridge.sources.live_models import as_installed
from bridge.sources.opening import open_source
from tests.models.decoder_families import build

FAMILY = "Qwen2MoeForCausalLM"  # no table: experts, a group without norm, routers of both kinds


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    build(FAMILY).save_pretrained(path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(as_installed, "models_are_as_installed", lambda: True)  # tests load transformers first
    return tmp_path / "qbridge" / "structures"


ABSENT = """
import importlib.util, sys
names, find_spec = ("torch", "transformers"), importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in names else find_spec(name, package)
sys.modules.update(dict.fromkeys(names))  # importing them is an ImportError
import bridge
from bridge.core.errors import PlanError
"""


def without_frameworks(code: str) -> str:
    """What code prints where the package is installed without extras."""
    done = subprocess.run([sys.executable, "-c", ABSENT + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_torch_a_model_without_a_table_is_refused_with_the_command(saved: Path, cache: Path) -> None:
    said = without_frameworks(f"""
try:
    bridge.plan({str(saved)!r}, target="hf", quant="int8_wo")
except PlanError as error:
    print(error)
""")
    assert f"{FAMILY} has no table" in said and "torch and transformers are not installed: pip install" in said


@pytest.mark.slow
def test_without_torch_weights_are_verified(tmp_path: Path) -> None:
    model = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-llama")
    said = without_frameworks(f"""
bridge.convert({model!r}, target="hf", quant="int8_wo", out={str(tmp_path / "out")!r})
report = bridge.verify({str(tmp_path / "out")!r}, against={model!r})
print(report.passed, len(report.parity.tensors), report.parity.outputs)
""")
    assert said.startswith("True 3")


@pytest.mark.slow
def test_the_second_plan_imports_no_torch(saved: Path, cache: Path) -> None:
    code = (
        "import sys, bridge\n"
        f"plan = bridge.plan({str(saved)!r}, target='trt', quant='int8_wo')\n"
        "print(plan.digest, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert runs[0][1:] == ["True", "True"]
    assert runs[1][1:] == ["False", "False"]
    assert runs[0][0] == runs[1][0]


@pytest.mark.slow
def test_what_is_recalled_is_what_was_traced(saved: Path, cache: Path) -> None:
    source = open_source(saved)
    assert load_traced(source) is None
    traced = trace_structure(source)
    store_traced(source, traced)
    assert load_traced(open_source(saved)) == traced
    assert [path.suffix for path in cache.iterdir()] == [".cached"]


@pytest.mark.slow
def test_another_config_or_other_tensors_are_not_taken_for_it(saved: Path, cache: Path) -> None:
    source = open_source(saved)
    store_traced(source, trace_structure(source))
    assert load_traced(open_source(saved, config={"num_attention_heads": 3})) is None
    assert load_traced(open_source(build(FAMILY, torch.float16))) is None


@pytest.mark.slow
def test_a_damaged_file_is_traced_anew(saved: Path, cache: Path) -> None:
    source = open_source(saved)
    traced = trace_structure(source)
    store_traced(source, traced)
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes().replace(b"out_in", b"in_out"))
    assert load_traced(source) is None
    plan = bridge.plan(saved, target="trt", quant="int8_wo")
    assert plan.traced
    assert load_traced(source) == traced


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_is_not_an_error(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert bridge.plan(saved, target="trt", quant="int8_wo").traced


@pytest.mark.slow
def test_other_packages_and_other_code_are_traced_anew(
    saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(saved)
    store_traced(source, trace_structure(source))
    assert load_traced(source) is not None
    for name, value in {"code": lambda: "9", "installed": lambda _: "9"}.items():
        with monkeypatch.context() as other:
            other.setattr(provenance, name, value)
            assert load_traced(source) is None, name


@pytest.mark.slow
def test_code_that_others_may_have_changed_stores_nothing_and_reads_nothing(
    saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(saved)
    traced = trace_structure(source)
    with monkeypatch.context() as patched:
        patched.setattr(as_installed, "models_are_as_installed", lambda: False)
        store_traced(source, traced)
        assert not cache.exists()
    store_traced(source, traced)
    with monkeypatch.context() as patched:
        patched.setattr(as_installed, "models_are_as_installed", lambda: False)
        assert load_traced(source) is None
    assert load_traced(source) == traced
