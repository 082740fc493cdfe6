"""Traced structures that are kept: torch runs once a checkpoint, and nothing wrong is ever believed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bridge
from bridge.planning.trace import trace_structure
from bridge.planning.trace_cache import _changed, load, store
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
    return tmp_path / "qbridge" / "structures"


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
    assert load(source) is None
    traced = trace_structure(source)
    store(source, traced)
    assert load(open_source(saved)) == traced
    assert [path.suffix for path in cache.iterdir()] == [".json"]


@pytest.mark.slow
def test_another_config_or_other_tensors_are_not_taken_for_it(saved: Path, cache: Path) -> None:
    source = open_source(saved)
    store(source, trace_structure(source))
    assert load(open_source(saved, config={"num_attention_heads": 3})) is None
    assert load(open_source(build(FAMILY, torch.float16))) is None


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "text", "foreign"])
def test_a_damaged_file_is_traced_anew(saved: Path, cache: Path, damage: str) -> None:
    source = open_source(saved)
    traced = trace_structure(source)
    store(source, traced)
    (path,) = cache.iterdir()
    head, body = path.read_text().split("\n")
    texts = {
        "truncated": f"{head}\n{body[:-9]}",
        "changed": f"{head}\n{body.replace('out_in', 'in_out')}",
        "empty": "",
        "text": "[1, 2]",
        "foreign": f"{'0' * 64} {head.split()[1]}\n{body}",
    }
    assert len(set(texts.values()) | {f"{head}\n{body}"}) == 6
    path.write_text(texts[damage])
    assert load(source) is None
    plan = bridge.plan(saved, target="trt", quant="int8_wo")
    assert plan.traced
    assert load(source) == traced


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_is_not_an_error(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert bridge.plan(saved, target="trt", quant="int8_wo").traced


@pytest.mark.slow
def test_old_files_make_room(saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.planning.trace_cache.MAX_FILES", 2)
    source = open_source(saved)
    traced = trace_structure(source)
    for heads in (1, 2, 3, 6):
        store(open_source(saved, config={"num_attention_heads": heads}), traced)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.slow
def test_another_version_and_a_changed_checkout_are_traced_anew(
    saved: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("bridge", "mappings"):
        (tmp_path / folder).mkdir()
    code = tmp_path / "bridge" / "trace.py"
    code.touch()
    monkeypatch.setattr("bridge.planning.trace_cache.mappings", lambda: tmp_path / "mappings")
    source = open_source(saved)
    store(source, trace_structure(source))
    assert load(source) is not None
    with monkeypatch.context() as newer:
        newer.setattr("bridge.planning.trace_cache.__version__", "9")
        assert load(source) is None
    os.utime(code, ns=(0, code.stat().st_mtime_ns + 1))
    assert load(source) is None


def test_files_of_an_installed_package_may_have_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bridge" / "_mappings").mkdir(parents=True)
    (tmp_path / "bridge" / "trace.py").touch()
    monkeypatch.setattr("bridge.planning.trace_cache.mappings", lambda: tmp_path / "bridge" / "_mappings")
    assert _changed() == 0
