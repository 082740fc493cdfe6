"""Traced structures that are kept: torch runs once a checkpoint, and nothing wrong is ever believed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bridge
from bridge.recall import recall, remember
from bridge.sources import open_source
from bridge.trace import trace_structure
from tests.decoder_families import build

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


def test_what_is_recalled_is_what_was_traced(saved: Path, cache: Path) -> None:
    source = open_source(saved)
    assert recall(source) is None
    traced = trace_structure(source)
    remember(source, traced)
    assert recall(open_source(saved)) == traced
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_another_config_or_other_tensors_are_not_taken_for_it(saved: Path, cache: Path) -> None:
    source = open_source(saved)
    remember(source, trace_structure(source))
    assert recall(open_source(saved, config={"num_attention_heads": 3})) is None
    assert recall(open_source(build(FAMILY, torch.float16))) is None


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "text", "foreign"])
def test_a_damaged_file_is_traced_anew(saved: Path, cache: Path, damage: str) -> None:
    source = open_source(saved)
    traced = trace_structure(source)
    remember(source, traced)
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
    assert recall(source) is None
    plan = bridge.plan(saved, target="trt", quant="int8_wo")
    assert plan.traced
    assert recall(source) == traced


def test_a_directory_that_cannot_be_written_is_no_error(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert bridge.plan(saved, target="trt", quant="int8_wo").traced


def test_old_files_make_room(saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.recall._MOST", 2)
    source = open_source(saved)
    traced = trace_structure(source)
    for heads in (1, 2, 3, 6):
        remember(open_source(saved, config={"num_attention_heads": heads}), traced)
    assert len(list(cache.iterdir())) == 2
