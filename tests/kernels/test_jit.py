"""Kernels import from a checkout and from a wheel, cache where they can, and run where they cannot."""

from __future__ import annotations

import importlib
import os
import platform
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


# Every dtype, code and packing once, as a conversion calls them; prints how many functions had to be compiled.
EVERY = """
import sys
import numpy as np
from bridge.quant.codec.arrays import smooth
from bridge.verification.weight_error import compare
from bridge.quant.codec.encode import encode
from bridge.core.values import Encoding, Numeric
FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn"
for numeric, packed in [
    (Numeric(FP8, "tensor"), "in"), (Numeric(FP8, "block", (128, 128)), "in"), (Numeric("int8", "channel"), "in"),
    (Numeric("int4", "block", (128,)), "out"), (Numeric(FP4, "block", (16,), FP8), "in"),
    (Numeric(FP8, "block", (32,), "float8_e8m0fnu"), "in"),
]:
    for dtype, kind in ("bfloat16", np.uint16), ("float16", np.float16), ("float32", np.float32):
        for quotient in "float32", "weight":
            for transpose in False, True:
                coding = Encoding(packed=packed, quotient=quotient)
                bits = np.ones((8, 256), kind)
                smooth(bits, dtype, np.ones(256, np.float32))
                made = encode(bits, dtype, (numeric,), transpose=transpose, coding=coding)
                compare(bits, dtype, made, (numeric,), transpose=transpose, coding=coding)
compiled = 0
for name, module in list(sys.modules.items()):
    if name.startswith("bridge._kernels."):
        compiled += sum(sum(f.stats.cache_misses.values()) for f in vars(module).values() if hasattr(f, "stats"))
print(compiled)
"""

# Compiles afresh, since numba shows no machine code of a function from its cache.
MACHINE = """
import re
import numpy as np
from bridge._kernels import amax, compare, counts, decode, e5m2, fp4, fp8, integer, moments, quotient, ranges
codes, single, brain = np.zeros((2, 256), np.uint8), np.zeros((2, 256), np.float32), np.zeros((2, 256), np.uint16)
rows, blocks = np.ones((2, 1), np.float32), np.ones((2, 16), np.float32)
for scale, across in (rows, 256), (blocks, 16):
    fp8.fp8(brain, scale, 1, across, codes)
    fp4.fp4(brain, scale, 1, across, codes)
    integer.integer(brain, scale, 1, across, -128.0, 127.0, codes)
quotient.to_brain(brain, rows, 1, 256, brain)
amax.amax(brain, 1, 16, np.empty((2, 16), np.uint16))
decode.floats(codes, True, rows, 1, 256, single)
small = np.float32(0), np.float32(0), np.float32(0)
compare.compare(brain, codes, compare.E4M3, compare.BYTES, np.uint8(0), rows, 1, 256, *small, np.empty((2, 5)))
moments.moments(brain[0], np.zeros(moments.PLACES), np.zeros(moments.BINS, np.int64))
ranges.widest(brain, 1, 32)
e5m2.codes_e5m2(brain, blocks, 1, 16, codes)
e5m2.values_e5m2(codes, blocks, 1, 16, single)
counts.nonzero(codes[0], np.uint8(127))
for function in (
    fp8._uniform, fp8._varied, fp4._uniform, fp4._varied, integer._uniform, integer._varied, quotient._brain,
    amax._fold, amax._halves, decode._floats, compare._products, compare._eights,
    moments._widen, moments._extremes, moments._sums, moments._squares_about, ranges._fold, counts.nonzero,
    e5m2._codes, e5m2._values, compare._fives, compare._largest,
):
    (code,) = function.inspect_asm().values()
    found = {word for word in re.findall(r"\\bvdivps\\b.*|\\bv\\w+\\b", code)}
    wide = any(re.search("[yz]mm", line) for line in found if line.startswith("vdivps"))
    print(function.__module__.rpartition(".")[2], function.__name__, "ymm" in code or "zmm" in code,
          "wide" if wide else "narrow" if "vdivps" in code or "vdivss" in code else "none",
          *sorted({word for word in found if word in ("vpmovzxdq", "vpmovqb", "vpmovqd", "vpmovqw")}))
"""


def python(script: str, **environment: str) -> str:
    command, env = [sys.executable, "-c", script], {**os.environ, **environment}
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One new cache of numba for the tests below: the first compiles, the second compiles the rest."""
    return tmp_path_factory.mktemp("numba")


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are those of x86")
def test_the_inner_loops_are_vectorised_in_32_bits(cache: Path) -> None:
    divide = {("fp8", "_uniform"), ("fp8", "_varied"), ("fp4", "_uniform"), ("fp4", "_varied")}
    divide |= {("integer", "_uniform"), ("integer", "_varied"), ("quotient", "_brain"), ("e5m2", "_codes")}
    for line in python(MACHINE, NUMBA_CACHE_DIR=str(cache)).splitlines():
        module, name, vectors, division, *widened = line.split()
        assert vectors == "True", line
        assert division == ("wide" if (module, name) in divide else "none"), line
        assert not widened, f"{line}: 64-bit lanes, half of the speed"


@pytest.mark.slow
def test_a_second_process_compiles_nothing(cache: Path) -> None:
    assert int(python(EVERY, NUMBA_CACHE_DIR=str(cache))) > 10
    assert int(python(EVERY, NUMBA_CACHE_DIR=str(cache))) == 0


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
                free = {"reassoc", "nsz", "contract"} if name.endswith("_estimate") else set()  # they only bound
                assert set(options.get("fastmath") or ()) == free and not options.get("parallel"), name
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
