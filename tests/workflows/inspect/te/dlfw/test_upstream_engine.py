"""nvdlfw-inspect's own engine with the features of bridge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from bridge.workflows.inspect.statistics.coding import fake_quantized  # noqa: E402
from bridge.workflows.inspect.statistics.quantization import of_format, of_recipe  # noqa: E402
from tests.oracles.nvdlfw_process import HOME, LAYER  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HOME.is_dir(), reason="nvdlfw-inspect is not installed here; install it with: make oracles"),
]
X = np.linspace(-3, 4, 64, dtype=np.float32).reshape(2, 32)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("logs")
    command = [sys.executable, "-m", "tests.oracles.nvdlfw_process", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), folder


@pytest.mark.parametrize("run", ["first", "again"])
def test_it_routes_calls_to_the_features(told: Any, run: str) -> None:
    answers = told[0][run]
    assert answers[f"{LAYER} fprop"] == [[False, 1], [True, 1], [False, None]]
    assert answers[f"{LAYER} dgrad"] == [[False, 1], [False, None], [False, None]]
    assert answers[f"{LAYER} wgrad"] == [[True, None], [False, None], [False, None]]
    assert answers[f"{LAYER} activation"] == [[True, 1], [True, 2]]  # of two features
    assert answers[f"{LAYER} output"] == [[False, None]] * 2
    assert answers["model.0.fc2 fprop"] == [[True, None], [False, None], [False, None]]
    assert answers["model.0.fc2 activation"] == [[False, None]] * 2


@pytest.mark.parametrize("run", ["first", "again"])
def test_values_are_those_of_bridge(told: Any, run: str) -> None:
    answers, folder = told[0][run], told[1]
    np.testing.assert_array_equal(np.float32(answers["made"]), fake_quantized(X, "float32", of_format("FP8E4M3")))
    expected = float(np.square(fake_quantized(X, "float32", of_recipe("mxfp8", "activation")) - X).mean())
    logged = {name.removeprefix(f"{LAYER}_activation_"): value for name, value in answers["logged"].items()}
    assert {*logged} == {"max 0", "numel 0", "mse 0", "fp8_mse 0"}
    assert (logged["max 0"], logged["numel 0"]) == (4.0, 64.0)
    assert logged["mse 0"] == pytest.approx(expected, rel=1e-5)  # of the quantizer that is handed over
    tensors = load_file(folder / run / "dumps" / "rank_0" / "step_000000.safetensors")
    names = {f"{LAYER}_weight.high_precision", "model.0.fc3_activation.high_precision"}  # of two sections
    assert {*tensors} == names
    assert all(torch.equal(tensor, torch.linspace(-3, 4, 64).reshape(2, 32)) for tensor in tensors.values())


def test_mistakes_are_told_and_end_no_process(told: Any) -> None:
    assert "LogTensorStats: statistic 'maxx' is unknown" in told[0]["first"]["mistake"]


def test_classes_written_for_it_load_without_it(told: Any) -> None:
    assert told[0]["own"] == ["Mine"]
