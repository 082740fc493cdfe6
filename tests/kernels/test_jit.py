"""Kernels import from a checkout and from a wheel, cache where they can, and run where they cannot."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numba
import pytest

import bridge
from bridge._kernels import jit

ROOT = Path(bridge.__file__).parent.parent
PROBE = """
import numpy as np
from bridge._kernels.fp8 import fp8
codes = np.empty((1, 2), np.uint8)
fp8(np.array([[0x3F80, 0xC000]], np.uint16), np.ones((1, 1), np.float32), 1, 2, codes)
print(codes.tolist(), __import__("bridge").__file__, __import__("sys").modules["bridge._kernels.fp8"].__file__)
"""


def test_without_a_writable_cache_kernels_still_run_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def no_cache(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            return lambda function: (_ for _ in ()).throw(RuntimeError("cannot cache function 'f': no locator"))
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", no_cache)
    with pytest.warns(RuntimeWarning, match=r"no locator; set NUMBA_CACHE_DIR to a writable directory"):
        double = jit.kernel(lambda x: 2 * x)
    assert double(4) == 8


def test_kernels_compile_without_the_options_that_change_numbers() -> None:
    for path in sorted((ROOT / "kernels").glob("*.py")):
        module = importlib.import_module(f"bridge._kernels.{path.stem}") if path.stem != "__init__" else None
        for name, value in vars(module).items() if module else ():
            if isinstance(value, numba.core.dispatcher.Dispatcher):
                options = value.targetoptions
                assert not options.get("fastmath") and not options.get("parallel"), name
                assert options["error_model"] == "numpy" and options["nogil"], name


def test_no_kernel_calls_a_compiled_function_of_another_file() -> None:
    """numba's cache would not notice a change there."""
    for path in sorted((ROOT / "kernels").glob("*.py")):
        imported = re.findall(r"^(?:from|import) (\S*kernels\S*)", path.read_text(), re.MULTILINE)
        assert set(imported) <= {"bridge._kernels.jit"}, path.name


@pytest.mark.slow
def test_the_wheel_carries_the_kernels_inside_the_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="builds without network, so the build backend must be installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {f"bridge/_kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"bridge"}
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.startswith("[[56, 192]]"), run.stderr
    assert run.stdout.count(str(tmp_path / "site" / "bridge")) == 2
