"""The kernel of a GPU tells what that of the CPU does; so do sessions whose tensors take it.

Triton's interpreter runs it, on the CPU, in one process for all tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge._kernels import moments as kernel
from bridge.sources.memory import bits_of
from bridge.workflows.inspect.statistics.on_device import on_device
from bridge.workflows.inspect.statistics.sums import TensorSums
from tests.kernels import gpu_process

pytest.importorskip("triton", reason="the kernels of a GPU are written for Triton")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("gpu") / "found.npz"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.kernels.gpu_process", str(out)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return np.load(out)


def of_cpu(values: torch.Tensor) -> TensorSums:
    sums, dtype = TensorSums(), str(values.dtype).removeprefix("torch.")
    sums.add(bits_of(values, dtype), dtype)
    return sums


def same(totals: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Sums that cancel are as near as those of magnitudes, which do not."""
    np.testing.assert_array_equal(totals[: kernel.SUM], wanted[: kernel.SUM], err_msg=what)
    assert abs(totals[kernel.SUM] - wanted[kernel.SUM]) <= 1e-12 * wanted[kernel.ABS], what
    np.testing.assert_allclose(totals[kernel.ABS :], wanted[kernel.ABS :], rtol=1e-12, err_msg=what)


def test_totals_and_bins_are_those_of_the_cpu(found: Any) -> None:
    for row in gpu_process.grid():
        wanted = of_cpu(gpu_process.case(*row))
        same(found[f"totals {row}"], wanted.totals, str(row))
        np.testing.assert_array_equal(found[f"bins {row}"], wanted.bins, err_msg=str(row))


def test_rows_that_do_not_count_are_left_out(found: Any) -> None:
    values = gpu_process.case("odd", 6000, "float32").view(20, 15, 20)
    kept = (torch.arange(300) % 3).view(15, 20).T != 0
    same(found["totals kept"], of_cpu(values[kept]).totals, "kept")
    assert found["bins kept"].size == 0


@pytest.mark.parametrize("dtype", [*gpu_process.STEPS])
def test_a_session_tells_what_it_does_on_the_host(found: Any, dtype: str) -> None:
    told = json.loads(str(found["told"]))[dtype]
    wanted = gpu_process.session(dtype)
    assert told.keys() == wanted.keys() and len(told) > 200
    for key, value in wanted.items():
        assert told[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-9, abs=1e-12)), key


def test_a_step_is_one_copy(found: Any) -> None:
    """Of 15 tensors, three layers with all six but the output; no copy in between, and none after."""
    copied = [count for count in json.loads(str(found["told"]))["copied"] if count]
    assert copied == [15] * sum(gpu_process.STEPS.values())


def test_a_tensor_of_the_cpu_stays_there() -> None:
    assert not on_device(torch.ones(3))


def test_it_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the interpreter does not show; subnormals are kept, and nothing waits for an addition to a bin."""
    from triton import compile as compiled
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bridge._kernels.gpu import moments

    if "nvidia" not in backends:
        pytest.skip("this Triton does not compile for CUDA")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {"values": "*i16", "kept": "*i8", "partials": "*fp64", "bins": "*i64"}
    constants = {"MASKED": True, "MAGNITUDES": True, "BLOCK": moments.BLOCK}
    signature = {**pointers, "n": "i32", "width": "i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=moments._moments, signature=signature, constexprs=constants)
    made = compiled(source, target=GPUTarget("cuda", 80, 32), options=moments.OPTIONS)
    text = made.asm["ptx"]
    assert made.asm["cubin"] and ".ftz" not in text and "fma.rn.f64" not in text
    assert "red.global.gpu.relaxed.add.u64" in text
