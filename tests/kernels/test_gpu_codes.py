"""The kernels of a GPU make the codes and scales of those of the CPU, byte for byte.

Triton's interpreter runs them, on the CPU, in one process for all tests; its compiler shows what a GPU would run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.gpu_cases import DTYPES, SCHEMES

pytest.importorskip("triton", reason="the kernels of a GPU are written for Triton")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("gpu") / "found.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.kernels.gpu_codes_process", str(out)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_give_the_bytes_of_the_cpu(found: Any, scheme: str) -> None:
    of_scheme = {case: problem for case, problem in found["problems"].items() if case.split()[0] == scheme}
    assert len(of_scheme) >= 9
    assert {case: problem for case, problem in of_scheme.items() if problem} == {}


def test_casts_by_groups_have_the_bytes_of_the_cpu(found: Any) -> None:
    assert [found["problems"][f"casts {dtype}"] for dtype in DTYPES] == ["", "", ""]


def test_only_scales_that_are_rounded_up_are_left_to_plain_torch(found: Any) -> None:
    assert found["unfused"] and all("round_up=True" in coding for coding in found["unfused"])


def test_a_value_that_is_no_number_is_refused(found: Any) -> None:
    for message in found["refused"].values():
        assert message.startswith("layers.0: holds NaN or infinity")


COMPILED = {
    "nvfp4": "_blocks 1 16 16 256 TIMES FP4 TO_HALF NONE 1 0",
    "fp8_block": "_blocks 128 128 128 1 BRAIN FP8 NONE TO_BRAIN 0 0",
    "int4": "_blocks 1 128 128 32 HALF INTEGER NONE TO_HALF 1 136",
    "per_block_cast_to_fp8": "_blocks 128 128 128 1 PRODUCT FP8 NONE NONE 0 0",
    "int8": "_rows 4096 SINGLE INTEGER NONE TO_BRAIN 128",
    "fp8": "_under 4096 FP8 NONE TO_BRAIN 0",
}


@pytest.mark.parametrize("scheme", COMPILED)
def test_they_compile_for_a_gpu(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the interpreter does not show: divisions are IEEE's, subnormals are kept, nothing is fused."""
    from triton import compile as compiled
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bridge._kernels.gpu import codes

    if "nvidia" not in backends:
        pytest.skip("this Triton does not compile for CUDA")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    name, *words = COMPILED[scheme].split()
    kernel = getattr(codes, name)
    named = [name for name in kernel.arg_names if name.isupper() and name != "TO"]
    constants = {
        key: int(word) if word.isdigit() else getattr(codes, word) for key, word in zip(named, words, strict=True)
    }
    constants |= {"TO": codes.TO_HALF} if name == "_blocks" else {}
    pointers = {
        "values": "*i16",
        "above": "*fp32",
        "divisor": "*fp32",
        "codes": "*u8",
        "scale": "*i32",
        "largest": "*i32",
    }
    sizes = dict.fromkeys(("rows", "cols", "groups", "wide", "n"), "i32")
    types = pointers | sizes | dict.fromkeys(("bound", "least", "low", "high"), "fp32")
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = compiled(source, target=GPUTarget("cuda", 90, 32), options=codes.OPTIONS)
    text = made.asm["ptx"]
    assert made.asm["cubin"] and "div.rn.f32" in text
    assert not [word for word in (".ftz", "fma.rn", "div.full", "div.approx", "rcp.approx") if word in text]
