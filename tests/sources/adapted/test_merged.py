"""Adapters merged while they are read, beside peft's merge_and_unload and save_pretrained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.sources.opening import open_source
from tests.oracles.peft_cases import CASES

ROOT = Path(__file__).parents[3]
PEFT = ROOT / ".venv" / "peft"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PEFT.is_dir(), reason="needs peft: make oracles")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("peft")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{PEFT}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.oracles.peft_process", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr
    return out, json.loads((out / "results.json").read_text())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.widened])
def test_merged_tensors_have_the_bytes_of_peft(made: tuple[Path, dict[str, Any]], name: str) -> None:
    out, results = made
    assert "error" not in results[name], results[name]
    ours, theirs = open_source(str(out / name / "adapter")), open_source(str(out / name / "merged"))
    assert dict(ours.specs) == dict(theirs.specs)
    differ = [name for name in ours.specs if not np.array_equal(ours.read(name), theirs.read(name))]
    assert not differ, differ
    base = open_source(str(out / name / "base"))
    assert any(not np.array_equal(base.read(name), ours.read(name)) for name in ours.specs)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.live])
def test_a_peft_model_in_memory_has_the_same_bytes_and_stays_as_it_is(
    made: tuple[Path, dict[str, Any]], name: str
) -> None:
    result = made[1][name]
    assert result == {"live": [], "changed": []}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_whole_tensor(made: tuple[Path, dict[str, Any]], name: str) -> None:
    source = open_source(str(made[0] / name / "adapter"))
    for tensor, spec in source.specs.items():
        if not spec.shape:
            continue
        whole = source.read(tensor)
        for begin, end in ((0, 1), (spec.shape[0] // 3, spec.shape[0] - 1), (spec.shape[0] - 1, spec.shape[0])):
            assert np.array_equal(source.read_rows(tensor, begin, end), whole[begin:end]), (tensor, begin, end)
