"""Kernels are compiled ahead of time, run without numba, and come with a wheel."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge._kernels import jit, native, objects
from bridge._kernels.fp8 import fp8
from bridge._kernels.smooth import smooth

ROOT = Path(bridge.__file__).parent.parent
PROBE = """
import sys
sys.modules["numba"] = None
import numpy as np
from bridge._kernels.fp8 import fp8
codes = np.empty((1, 2), np.uint8)
fp8(np.array([[0x3F80, 0xC000]], np.uint16), np.ones((1, 1), np.float32), 1, 2, codes)
print(codes.tolist(), __import__("bridge").__file__, __import__("sys").modules["bridge._kernels.fp8"].__file__)
"""

# Every dtype, code and packing once, as a conversion calls them, where numba cannot be imported.
EVERY = """
import sys
sys.modules["numba"] = None
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
print([name for name in sys.modules if name.startswith("llvmlite")])
"""

# The process that compiles: kernels are functions of numba, which shows their machine code.
MACHINE = """
import re
import numpy as np
from bridge._kernels import jit
jit.BUILDING = True
from bridge._kernels import amax, compare, counts, decode, e5m2, fp4, fp8, fused, integer, moments, quotient, ranges
codes, single, brain = np.zeros((2, 256), np.uint8), np.zeros((2, 256), np.float32), np.zeros((2, 256), np.uint16)
rows, blocks = np.ones((2, 1), np.float32), np.ones((2, 16), np.float32)

def call(module, name, *given):
    scratch = getattr(module, "_scratch", None)
    getattr(module, name)(*given, *(scratch(*given) if scratch else ()))

for scale, across in (rows, 256), (blocks, 16):
    call(fp8, "fp8", brain, scale, 1, across, codes)
    call(fp4, "fp4", brain, scale, 1, across, codes)
    call(integer, "integer", brain, scale, 1, across, -128.0, 127.0, codes)
call(quotient, "to_brain", brain, rows, 1, 256, brain)
call(amax, "amax", brain, 1, 16, np.empty((2, 16), np.uint16))
call(decode, "floats", codes, 1, rows, 1, 256, single)
small = np.float32(0), np.float32(0), np.float32(0)
kind = compare.E4M3, compare.BYTES, np.uint8(0)
call(compare, "compare", brain, codes, *kind, rows, 1, 256, *small, np.empty((2, 6)), 0)
call(moments, "moments", brain[0], np.zeros(moments.PLACES), np.zeros(moments.BINS, np.int64))
call(ranges, "widest", brain, 1, 32, np.empty(1))
call(e5m2, "codes_e5m2", brain, blocks, 1, 16, codes)
call(e5m2, "values_e5m2", codes, blocks, 1, 16, single)
call(counts, "nonzero", codes[0], np.uint8(127), np.empty(1, np.int64))
most, number = np.empty((2, 16), np.uint16), 2.0**-126
fused.fp8_rows(brain, 448.0, number, most[:, 0].copy(), rows[:, 0].copy(), codes)
fused.fp8_under(brain, 1.0, 1, most[:, 0].copy(), codes)
fused.int8_rows(brain, 127.0, number, most[:, 0].copy(), rows[:, 0].copy(), codes)
fused.int4_rows(brain, 7.0, number, np.uint8(0), most, blocks, codes[:, :128].copy(), *fused._two_rows(brain))
fused.int4_row_pairs(brain, 7.0, number, most, blocks, codes[:1], *fused._two_rows(brain))
fused.nvfp4_rows(brain, number, most, codes[:, :16].copy(), codes[:, :128].copy(), *fused._one_row(brain))
for function in (
    fused.fp8_rows, fused.fp8_under, fused.int8_rows, fused.int4_rows, fused.int4_row_pairs, fused.nvfp4_rows,
    fp8._uniform, fp8._varied, fp4._uniform, fp4._varied, integer._uniform, integer._varied, quotient._brain,
    amax._fold, amax._halves, decode._floats, compare._within, compare._clipped, compare._eights,
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

OPTIONS = """
import importlib, json
from bridge._kernels import build, jit
jit.BUILDING = True
found = {}
for module in build.modules():
    for name, value in vars(importlib.import_module(f"bridge._kernels.{module}")).items():
        if hasattr(value, "targetoptions"):
            options = value.targetoptions
            plain = [options[option] for option in ("error_model", "nogil", "_nrt")]
            found[f"{module}.{name}"] = [sorted(options.get("fastmath") or ()), *plain, bool(options.get("parallel"))]
print(json.dumps(found))
"""


def python(script: str, **environment: str) -> str:
    command, env = [sys.executable, "-c", script], {**os.environ, **environment}
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are those of x86")
def test_the_inner_loops_are_vectorised_in_32_bits() -> None:
    divide = {("fp8", "_uniform"), ("fp8", "_varied"), ("fp4", "_uniform"), ("fp4", "_varied")}
    divide |= {("integer", "_uniform"), ("integer", "_varied"), ("quotient", "_brain"), ("e5m2", "_codes")}
    divide |= {
        ("fused", name) for name in ("fp8_rows", "fp8_under", "int8_rows", "int4_rows", "int4_row_pairs", "nvfp4_rows")
    }
    for line in python(MACHINE).splitlines():
        module, name, vectors, division, *widened = line.split()
        assert vectors == "True", line
        assert division == ("wide" if (module, name) in divide else "none"), line
        if (module, name) != ("fused", "nvfp4_rows"):  # it writes the scale of a block as pairs, with stores of 8 bytes
            assert not widened, f"{line}: 64-bit lanes, half of the speed"


@pytest.mark.slow
def test_no_process_but_the_compiler_loads_numba() -> None:
    linked = objects.stored("fp8").suffix == objects.LINKED
    loaded = python(EVERY)
    assert (loaded == "[]\n") if linked else ("llvmlite.binding" in loaded)


@pytest.mark.slow
def test_kernels_compile_without_the_options_that_change_numbers() -> None:
    found = json.loads(python(OPTIONS))
    assert len(found) > 80
    for name, (fastmath, error_model, nogil, nrt, parallel) in found.items():
        free = ["contract", "nsz", "reassoc"] if name.endswith("_estimate") else []  # they only bound
        assert (fastmath, error_model, nogil, nrt, parallel) == (free, "numpy", True, False, False), name


def test_a_kernel_calls_functions_of_its_own_file() -> None:
    """The digest in the name of its machine code is of that file, and of those that compile."""
    for path in sorted((ROOT / "kernels").glob("*.py")):
        imported = re.findall(r"^(?:from|import) (\S*kernels\S*)", path.read_text(), re.MULTILINE)
        allowed = {"bridge._kernels", "bridge._kernels.native", "bridge._kernels.objects", "bridge._kernels.build"}
        own = allowed if path.stem in ("jit", "native", "build") else {"bridge._kernels.jit"}
        assert set(imported) <= own, path.name


def test_other_arrays_than_it_is_compiled_for_are_refused() -> None:
    bits, codes = np.zeros((2, 4), np.uint16), np.zeros((2, 4), np.uint8)
    one = np.ones((1, 1), np.float32)
    fp8(bits, one, 2, 4, codes)
    for given in (
        (bits.astype(np.uint8), one, 2, 4, codes),
        (bits[:, ::2], one, 2, 2, codes),
        (bits[0], one, 2, 4, codes),
    ):
        with pytest.raises(
            TypeError, match=r"fp8\(.*: compiled for uint16\[:,:\] float32\[:,:\] int64 int64 uint8\[:,:\]="
        ):
            fp8(*given)
    for given in (bits, one, 2, codes), (bits.tolist(), one, 2, 4, codes), (bits, one, 2, 4, codes[:, ::2]):
        with pytest.raises(TypeError, match="compiled for"):
            fp8(*given)
    constant = np.frombuffer(bytes(8), np.uint8).reshape(2, 4)
    with pytest.raises(TypeError, match=r"uint8\[2, 4\] read-only"):
        fp8(bits, one, 2, 4, constant)
    fp8(np.frombuffer(bytes(16), np.uint16).reshape(2, 4), one, 2, 4, codes)  # what is read may be read-only


def test_a_signature_stands_for_both_widths_of_bits() -> None:
    assert jit.expand("bits[:] int64 bits[:]") == [
        ("uint16[:]", "int64", "uint16[:]"),
        ("uint32[:]", "int64", "uint32[:]"),
    ]
    assert jit.expand("uint8[:]") == [("uint8[:]",)]
    assert {words[0] for words in smooth.signatures} == {"uint16[:,:]", "uint32[:,:]"}


@pytest.mark.slow
def test_machine_code_that_is_missing_stale_or_damaged_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy of the kernels that cannot be written, then in one that can."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "bridge", site / "bridge", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "mappings", site / "mappings")
    shutil.copytree(ROOT / "kernels", site / "kernels", ignore=shutil.ignore_patterns("__pycache__", "objects"))
    (tmp_path / "random.py").write_text("raise SystemExit('code of the working directory ran')")
    script = """
import sys
sys.path.remove("")
import numpy as np
from bridge._kernels import objects
if "closed":
    objects._is_writable = lambda directory: directory.name == "kernels"
from bridge._kernels.smooth import smooth
out = np.empty((1, 2), np.uint32)
smooth(np.ones((1, 2), np.uint16), np.ones((1, 2), np.float32), out)
print(out.tolist()[0][0])
"""

    def run(closed: bool) -> None:
        env = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_OPT": "0"}
        command = [sys.executable, "-c", script.replace('"closed"', str(closed))]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.stdout == "65536\n", done.stderr

    cached, beside = tmp_path / "cache/qbridge/kernels", site / "kernels/objects"
    run(closed=True)
    (made,) = cached.iterdir()
    assert made.name.startswith(objects.file_name("smooth", objects.level())) and not beside.exists()
    command = [sys.executable, "-m", "bridge._kernels.build", "smooth", "--out", str(tmp_path / "plain")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, umask=0)
    (plain,) = (tmp_path / "plain").iterdir()
    assert not plain.stat().st_mode & 0o022  # whoever can write it decides what is run
    assert (made.name, made.read_bytes()) == (plain.name, plain.read_bytes())  # NUMBA_OPT has no effect
    run(closed=False)  # that of the cache serves
    assert not beside.exists()
    made.write_bytes(made.read_bytes()[:-1])
    run(closed=False)
    (first,) = beside.iterdir()
    with (site / "kernels/smooth.py").open("a") as file:
        file.write("# changed\n")
    run(closed=False)
    assert len(list(beside.iterdir())) == 1 and not first.exists()


@pytest.mark.slow
def test_without_a_linker_object_files_do_what_the_library_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "bridge._kernels.build", "smooth", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, env={**os.environ, "PATH": ""})
    (made,) = tmp_path.iterdir()
    assert made.suffix != objects.LINKED
    monkeypatch.setattr(native, "stored", lambda module: made)
    native._addresses.cache_clear()
    try:
        kernel = native.Kernel(smooth.__wrapped__, smooth.signatures, None)
        out = np.empty((1, 2), np.uint32)
        kernel(np.full((1, 2), 0x3F80, np.uint16), np.full((1, 2), 2, np.float32), out)
        assert out.view(np.float32).tolist() == [[2, 2]]
    finally:
        native._addresses.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere LLVM is asked")
def test_linux_and_llvm_say_the_same_of_the_processor() -> None:
    import llvmlite.binding as llvm

    asked = {feature for features in objects.LEVELS.values() for feature in features}
    has = {feature for feature, present in llvm.get_host_cpu_features().items() if present}
    assert objects._features() & asked == has & asked


@pytest.mark.slow
def test_the_wheel_carries_the_kernels_inside_the_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="builds without network, so the build backend must be installed")
    objects.stored("fp8")
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
    assert f"bridge/_kernels/objects/{objects.stored('fp8').name}" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"bridge"}
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.startswith("[[56, 192]]"), run.stderr
    assert run.stdout.count(str(tmp_path / "site" / "bridge")) == 2
