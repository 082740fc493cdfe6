"""examples/evaluate: its tasks are well-formed, its commands are lm_eval's, and its scores are of the right model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml

import bridge

ROOT = Path(__file__).parents[2]
EVALUATE = ROOT / "examples" / "evaluate"
SCRIPT = EVALUATE / "evaluate.py"
MODEL = "examples/models/tiny-llama"
TASKS = {path.stem: yaml.safe_load(path.read_text()) for path in EVALUATE.glob("*.yaml")}


def evaluate(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600, check=False)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "int4"
    bridge.convert(ROOT / MODEL, "hf", "int4_wo", path, runtime="transformers", verify=False)
    return path


@pytest.mark.parametrize("name", TASKS)
def test_each_document_of_a_task_makes_its_text_and_its_answer(name: str) -> None:
    task = TASKS[name]
    documents = [json.loads(line) for line in (ROOT / task["dataset_kwargs"]["data_files"]["test"]).open()]
    fields = {"begin", "ends", "right"}
    assert task["task"] == name and len(documents) == 24 and all({*one} == fields for one in documents)
    assert [one["right"] for one in documents].count(0) == 12
    for one in documents:
        right, wrong = one["ends"][one["right"]], one["ends"][1 - one["right"]]
        assert sorted(right.split()) == sorted(wrong.split()) and right != wrong
        filled = jinja2.Template(str(task["doc_to_target"])).render(**one)
        assert task["doc_to_target"] == "right" or filled == f"{one['begin']} {right}"


@pytest.mark.slow
def test_both_models_are_scored_by_one_command_each_and_the_source_first(out: Path) -> None:
    lines = evaluate(str(out), "--against", MODEL, "--in", "vllm", "--limit", "5", "--print").stdout.splitlines()
    words = [shlex.split(line) for line in lines]
    assert [one[one.index("--model_args") + 1] for one in words] == [f"pretrained={MODEL}", f"pretrained={out}"]
    for one in words:
        assert one[1:4] == ["-m", "lm_eval", "run"] and one[one.index("--model") + 1] == "vllm"
        assert one[one.index("--tasks") + 1 : one.index("--include_path")] == ["word_order", "sentences"]
        assert one[one.index("--limit") + 1] == "5" and one[one.index("--include_path") + 1] == str(EVALUATE)


@pytest.mark.slow
def test_a_program_that_would_load_other_weights_is_refused(tmp_path: Path) -> None:
    bridge.convert(ROOT / MODEL, "vllm", "fp8_pc_pt", tmp_path / "fp8", verify=False)
    done = evaluate(str(tmp_path / "fp8"), "--against", MODEL, "--in", "hf")
    assert done.returncode == 1 and "drops the scales with a warning and computes with wrong weights" in done.stderr
    done = evaluate(str(tmp_path / "fp8"), "--against", MODEL, "--in", "onnxruntime-genai")
    assert done.returncode == 1 and "its report says nothing of onnxruntime-genai; programs that it" in done.stderr


@pytest.mark.slow
def test_the_harness_scores_both_and_the_quantized_one_a_little_worse(out: Path) -> None:
    pytest.importorskip("lm_eval", reason='pip install "lm_eval[hf]>=0.4.13"')
    done = evaluate(str(out), "--against", MODEL, "--in", "hf")
    assert done.returncode == 0, done.stderr
    row = re.search(r"^sentences +bits_per_byte +(\S+) +(\S+) +(\S+)$", done.stdout, re.MULTILINE)
    assert row and 0 < float(row[3]) < 0.2 * float(row[1])
    assert re.search(r"^word_order +acc +1\.0000 ", done.stdout, re.MULTILINE)


def test_a_directory_that_convert_did_not_write_is_refused(tmp_path: Path) -> None:
    ended = evaluate(str(tmp_path), "--against", MODEL, "--print")
    assert ended.returncode == 1 and ended.stderr.startswith(f"{tmp_path}: has no bridge.json; ")
