"""Written graphs in runtimes of other people, against ONNX Runtime without optimizations.

onnx's ReferenceEvaluator and ONNX Runtime's optimized kernels run in this process; OpenVINO, Polygraphy and
onnx-graphsurgeon in one of their own (`make oracles`).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from bridge.targets.onnx.run.runtime import open_session
from bridge.verification.outputs import relative_l2
from tests.blocks import ROOT
from tests.covering import grid, usual
from tests.targets.trt.written import ACTIVATIONS, FAMILIES, WEIGHT_ONLY, reference, written

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
TOOLS = ROOT / ".venv" / "onnx"
EVERY = ("none", *WEIGHT_ONLY, *ACTIVATIONS)
FLOAT = 1e-5  # float32 sums of a few hundred products in another order: 4e-7 was measured
# Codes of activations at ties flip when a sum differs in its last bit, and every later layer feels it: 4e-3 was
# measured, where the schemes themselves cost 2e-2 and more.
FLIPS = 1e-2
# On x86 without VNNI, optimized INT8 kernels add pairs of products in 16 bits, which saturate: 4.2e-2 was measured.
SATURATES = 1e-1
CPU = Path("/proc/cpuinfo")
INT8 = ("int8", "int8_sq")
# OpenVINO casts to FP8 through float16 (400.12 becomes 384, not 416): it is no oracle for FP8 activations.
OPENVINO = (*(scheme for scheme in EVERY if scheme not in ("fp8", "w4a8_awq")),)
needs_tools = pytest.mark.skipif(not TOOLS.is_dir(), reason="OpenVINO and Polygraphy are not installed: make oracles")


def tolerance(scheme: str, optimized: bool = False) -> float:
    """The largest distance that rounding explains; `optimized`: by kernels for this processor."""
    if optimized and scheme in INT8 and platform.machine() == "x86_64" and "vnni" not in CPU.read_text():
        return SATURATES
    return FLIPS if scheme in ACTIVATIONS else FLOAT


def with_tools(*command: str, jobs: Sequence[Mapping[str, Any]] = ()) -> str:
    """Run Python with the oracles in its path; what it printed."""
    done = subprocess.run(
        [sys.executable, *command], input=json.dumps(jobs), capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(TOOLS), "POLYGRAPHY_AUTOINSTALL_DEPS": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@grid({"scheme": EVERY, "family": FAMILIES})
def test_the_reference_evaluator_of_onnx_computes_the_same(scheme: str, family: str) -> None:
    directory = written(scheme, family)
    given, name, values = reference(directory)
    (ours,) = ReferenceEvaluator(onnx.load(directory / "model.onnx")).run([name], given)
    assert relative_l2(ours, values) < tolerance(scheme)


@grid({"scheme": EVERY, "family": FAMILIES})
def test_the_optimized_kernels_of_onnx_runtime_compute_the_same(scheme: str, family: str) -> None:
    directory = written(scheme, family)
    given, name, values = reference(directory)
    optimized, _ = open_session(directory / "model.onnx", optimize=True)
    assert relative_l2(optimized.run([name], given)[0], values) < tolerance(scheme, optimized=True)


@needs_tools
@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.product)])
def test_openvino_computes_the_same(family: str, tmp_path: Path) -> None:
    jobs, expected = [], {}
    for scheme in OPENVINO:
        directory = written(scheme, family)
        given, _, expected[scheme] = reference(directory)
        job = {
            "directory": str(directory),
            "inputs": f"{tmp_path}/{scheme}.in.npz",
            "outputs": f"{tmp_path}/{scheme}.npz",
        }
        np.savez(job["inputs"], **given)
        jobs.append(job)
    with_tools(str(Path(__file__).with_name("other_runtimes.py")), "openvino", jobs=jobs)
    for scheme, values in expected.items():
        far = relative_l2(np.load(tmp_path / f"{scheme}.npz")["first"], values)
        assert far < tolerance(scheme, optimized=True), f"{scheme}: {far:.1e}"


@needs_tools
@pytest.mark.parametrize("family", usual(["llama"], FAMILIES))
def test_graphsurgeon_imports_and_exports_the_same_graph(family: str, tmp_path: Path) -> None:
    schemes = ("none", "int4_wo", "fp8", "int8_sq")
    jobs = [{"directory": str(written(scheme, family)), "outputs": f"{tmp_path}/{scheme}.onnx"} for scheme in schemes]
    with_tools(str(Path(__file__).with_name("other_runtimes.py")), "graphsurgeon", jobs=jobs)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for scheme in schemes:
        given, name, values = reference(written(scheme, family))
        session = ort.InferenceSession(tmp_path / f"{scheme}.onnx", options, providers=["CPUExecutionProvider"])
        assert np.array_equal(session.run([name], given)[0], values), scheme


@needs_tools
@pytest.mark.parametrize("scheme", usual(["fp8"], ["fp8", "int4_awq", "nvfp4_wo"]))
def test_polygraphy_inspects_and_folds_the_graph(scheme: str, tmp_path: Path) -> None:
    model, folded = written(scheme) / "model.onnx", tmp_path / "folded.onnx"
    main = ("-c", "import sys; from polygraphy.tools import main; sys.exit(main())")
    printed = with_tools(*main, "inspect", "model", str(model), "--show", "layers")
    count = len(onnx.load(model, load_external_data=False).graph.node)
    assert f"{count} Node(s)" in printed
    with_tools(*main, "surgeon", "sanitize", "--fold-constants", str(model), "-o", str(folded))
    assert 0 < len(onnx.load(folded, load_external_data=False).graph.node) <= count
