"""Every scheme in every dtype loads and runs in a default session of ONNX Runtime, or the plan says what does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import bridge
from bridge.verification.outputs import relative_l2
from tests.covering import grid, usual
from tests.targets.trt.written import ACTIVATIONS, FAMILIES, MODEL, WEIGHT_ONLY, feeds, written

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
LOADED = ("none", *ACTIVATIONS, *(scheme for scheme in WEIGHT_ONLY if scheme != "nvfp4_wo"))


def session(directory: Path, *, optimized: bool = True, **entries: str) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for key, value in entries.items():
        options.add_session_config_entry(f"session.{key}", value)
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(directory / "model.onnx", options, providers=["CPUExecutionProvider"])


def first_output(opened: Any) -> np.ndarray:
    return opened.run(None, feeds(opened))[0].astype(np.float32)


# Default options quantize the activations of weight-only INT4 and INT8 in float32 (accuracy level 4): 1e-2 here.
# FP8 and INT8 activations flip codes at ties when a kernel sums in another order: 4e-3 here.
NEAR = 0.05


@grid({"scheme": LOADED, "dtype": ["fp32", "fp16"], "family": FAMILIES}, pairs=[("dtype", "family")])
def test_a_default_session_runs_every_scheme(scheme: str, dtype: str, family: str) -> None:
    directory = written(scheme, family, dtype)
    ours = first_output(session(directory))
    assert np.isfinite(ours).all()
    plain = first_output(session(directory, optimized=False))
    assert relative_l2(ours, plain) < NEAR
    if scheme in ("none", *WEIGHT_ONLY):  # float16: sums of a few hundred products in half precision
        exact = first_output(session(directory, qdq_matmulnbits_accuracy_level="1"))
        assert relative_l2(exact, plain) < (2e-3 if dtype == "fp16" else 1e-5)


@grid({"dtype": ["fp32", "fp16"], "kv": ["fp8", "int8"]})
def test_a_default_session_runs_a_quantized_cache(dtype: str, kv: str) -> None:
    directory = written("int4_wo", "llama", dtype, kv)
    assert relative_l2(first_output(session(directory)), first_output(session(directory, optimized=False))) < NEAR


@pytest.mark.parametrize("scheme", usual(["int4_wo", "fp8"], ["int8_wo", "int4_wo", "fp8", "int8"]))
def test_the_half_graph_computes_what_the_float_graph_does(scheme: str) -> None:
    # float16 rounds norms, embeddings and sums to 2^-11; codes of activations flip where that moves them.
    half, single = (
        first_output(session(written(scheme, "llama", dtype), optimized=False)) for dtype in ("fp16", "fp32")
    )
    assert relative_l2(half, single) < (0.02 if scheme in WEIGHT_ONLY else 0.1)


@pytest.mark.parametrize("scheme", usual(["int8_wo"], ["none", "fp8", "int8_wo", "int4_wo"]))
def test_bfloat16_lacks_only_kernels_and_the_plan_says_what_to_write(scheme: str) -> None:
    with pytest.raises(Exception, match="Could not find an implementation for") as caught:
        session(written(scheme, "llama", "bf16"))
    assert "NOT_IMPLEMENTED" in str(caught.value)  # not "Type Error": the graph itself is right
    notes = bridge.plan(MODEL, "trt", scheme, dtype="bf16").notes
    assert any("no CPU kernels" in note and "--dtype fp32" in note for note in notes)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_fp4_has_no_kernel_and_the_plan_says_what_to_write(dtype: str) -> None:
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED.*DequantizeLinear"):
        session(written("nvfp4_wo", "llama", dtype))
    assert any(
        "no kernels for FP4" in note and "int4_wo" in note for note in bridge.plan(MODEL, "trt", "nvfp4_wo").notes
    )


def test_the_ops_of_tensorrt_are_told_before_they_are_written() -> None:
    notes = bridge.plan(MODEL, "trt", "mxfp8", custom_ops=True).notes
    assert any("TensorRT's own ops" in note and "write fp8" in note for note in notes)
    assert not any("ONNX Runtime" in note for note in bridge.plan(MODEL, "trt", "fp8").notes)
