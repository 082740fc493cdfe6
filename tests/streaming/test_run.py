"""The stream writes what the plan says, the same bytes on any number of threads, and no bad number."""

from __future__ import annotations

import io
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bridge.api import plans as opening
from bridge.api import verbs as api
from bridge.core.arrays import Buffers
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.output.directory import Work, output_directory
from bridge.core.values import TensorSpec
from bridge.planning.memory import working_set
from bridge.quant.calibration import Calibration, Provenance
from bridge.sources.opening import open_source
from bridge.streaming.context import ConversionContext
from bridge.streaming.encode import write_step
from bridge.streaming.run import run
from bridge.targets import file_settings
from tests.covering import grid
from tests.models.sources_made import CONFIG, MadeSource, llama_shapes, made_llama

PROVENANCE = Provenance("", "", "", "", "", "", 0, 0)
DOWN = "model.layers.1.mlp.down_proj"


def stream(
    source: MadeSource, quant: str | None, out: Path, workers: int = 2, memory: int = 1 << 30, **options: object
) -> SafetensorsFile:
    """Stream a whole model of made-up statistics into `out`."""
    structure = opening.structure_of(source)
    scheme = opening.scheme_of(quant, None, structure, source)
    plan = opening.plan_of(source, structure, "trt", scheme, options)
    modules = {s.site.module: s.site for s in plan.quantized if s.site}
    wide = {n: np.linspace(1, 3, source.specs[site.weight].shape[1], dtype=np.float32) for n, site in modules.items()}
    calibration = Calibration(PROVENANCE, dict.fromkeys(modules, np.array(4, np.float32)), wide, wide)
    with output_directory(out, plan.digest) as work:
        context = ConversionContext(
            plan, source, calibration, scheme, memory, work, file_settings(plan, source), workers
        )
        run(context, work.directory, threading.Event())
    return SafetensorsFile(out / "model.safetensors")


@pytest.mark.parametrize("quant", [None, "fp8", "fp8_block", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4_wo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_do_not_depend_on_threads_or_memory(quant: str | None, dtype: str, tmp_path: Path) -> None:
    source = made_llama(dtype)
    stream(source, quant, tmp_path / "a", workers=1, memory=1)
    stream(source, quant, tmp_path / "b", workers=5)
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_codes_are_laid_out_in_out_and_times_their_scale_give_the_weight(tmp_path: Path) -> None:
    source = made_llama()
    file = stream(source, "int8_wo", tmp_path / "out")
    codes, scale = file.read(f"{DOWN}.weight"), file.read(f"{DOWN}.weight_scale")
    weight = source.arrays[f"{DOWN}.weight"]
    assert codes.shape == weight.T.shape
    assert np.abs(codes.astype(np.float32) * scale - weight.T).max() <= scale.max() / 2 * 1.0001


def test_a_smoothed_weight_times_its_pre_scale_is_the_weight(tmp_path: Path) -> None:
    source = made_llama()
    file = stream(source, "int8_sq", tmp_path / "out")
    codes, scale, pre = (file.read(f"{DOWN}.{p}") for p in ("weight", "weight_scale", "pre_quant_scale"))
    made = codes.astype(np.float32) * scale * pre[:, None]
    weight = source.arrays[f"{DOWN}.weight"].T
    # half a step of 1/127 of a row's maximum, some 4 sigma times the smoothing's factor of 3, is about 1 % of the norm
    assert np.linalg.norm(made - weight) < 0.02 * np.linalg.norm(weight)


@pytest.mark.parametrize("quant", ["fp8", "fp8_block", "int8_wo", "int4_wo", "nvfp4_wo"])
def test_an_all_zero_matrix_gets_positive_scales_and_zero_codes(quant: str, tmp_path: Path) -> None:
    source = made_llama(**{f"{DOWN}.weight".replace(".", "__"): np.zeros((128, 384), np.float32)})
    file = stream(source, quant, tmp_path / "out")
    assert not file.read(f"{DOWN}.weight").any()
    assert (file.read(f"{DOWN}.weight_scale") > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", [f"{DOWN}.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_weight_that_is_not_finite_stops_the_run_and_leaves_nothing(bad: float, tensor: str, tmp_path: Path) -> None:
    source = made_llama()
    source.arrays[tensor].reshape(-1)[5] = bad
    with pytest.raises(SourceError, match=tensor):
        stream(source, "fp8", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_shard_that_vanishes_stops_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    source = made_llama()
    source.broken = frozenset({"model.layers.2.mlp.up_proj.weight"})
    with pytest.raises(SourceError, match="vanished"):
        stream(source, "fp8", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_dtype_is_cast_once_and_codes_come_from_the_source(tmp_path: Path) -> None:
    source = made_llama("bfloat16")
    half = stream(source, "int8_wo", tmp_path / "half", dtype="fp16")
    single = stream(source, "int8_wo", tmp_path / "single", dtype="fp32")
    assert half.specs["model.norm.weight"].dtype == "float16"
    assert (half.read(f"{DOWN}.weight") == single.read(f"{DOWN}.weight")).all()


QUANTS = [None, "fp8_block", "nvfp4_wo", "int8_wo", "int4_wo", "fp8"]
SIXTEEN_OR_32 = ["float16", "bfloat16", "float32"]
TARGETS = ["hf", "trt", "trtllm", "tripy", "ort"]


def expressed(quant: str | None, _dtype: str, target: str) -> bool:
    """Tripy has no such format, ONNX Runtime no such kernel."""
    return quant not in {"tripy": ("fp8_block", "nvfp4_wo"), "ort": ("fp8_block", "nvfp4_wo", "fp8")}.get(target, ())


@grid(
    {"quant": QUANTS, "dtype": SIXTEEN_OR_32, "target": TARGETS},
    pairs=[("quant", "target"), ("quant", "dtype"), ("dtype", "target")],
    valid=expressed,
)
def test_no_step_takes_more_memory_than_the_plan_says(quant: str | None, dtype: str, target: str) -> None:
    config = {**CONFIG, "intermediate_size": 28672, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    if target == "trtllm":
        config["num_key_value_heads"] = 4  # 128 rows of k and v: whole tiles
    arrays = {n: np.ones(s, DTYPES[dtype].storage) for n, s in llama_shapes(config).items()}
    source = MadeSource(arrays, {n: TensorSpec(n, a.shape, dtype) for n, a in arrays.items()}, config)
    options = {"dtype": "fp16"} if target in ("trtllm", "tripy") else {}
    structure = opening.structure_of(source)
    scheme = opening.scheme_of(quant, None, structure, source)
    plan = opening.plan_of(source, structure, target, scheme, options)
    modules = {part.module for step in plan.quantized for part in step.inputs}
    calibration = Calibration(PROVENANCE, dict.fromkeys(modules, np.array(4, np.float32)))
    work = Work(Path(), {}, io.StringIO())
    context = ConversionContext(plan, source, calibration, scheme, 1, work, file_settings(plan, source))
    for step in plan.steps:
        write_step(step, context, Buffers(), 1.0, lambda output, array, at: None)  # compiles
        tracemalloc.start()
        write_step(step, context, Buffers(), 1.0, lambda output, array, at: None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= working_set(step, plan.sources) + 100_000, (step.source, peak, working_set(step, plan.sources))


@pytest.mark.parametrize("target", ["tripy", "trt", "ort"])
def test_copying_int4_takes_no_more_memory_than_the_plan_says(tmp_path: Path, target: str) -> None:
    config = {**CONFIG, "intermediate_size": 14336, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    arrays = {n: np.ones(s, np.float16) for n, s in llama_shapes(config).items()}
    made = MadeSource(arrays, {n: TensorSpec(n, a.shape, "float16") for n, a in arrays.items()}, config)
    api.convert(made, target="hf", quant="int4_wo", out=tmp_path / "hf", verify=False)
    source = open_source(tmp_path / "hf")
    structure = opening.structure_of(source)
    scheme = opening.passthrough_of(None, source)
    plan = opening.plan_of(source, structure, target, scheme, {} if target == "ort" else {"dtype": "fp16"})
    context = ConversionContext(
        plan, source, None, scheme, 1, Work(Path(), {}, io.StringIO()), file_settings(plan, source)
    )
    for step in plan.quantized:
        write_step(step, context, Buffers(), None, lambda output, array, at: None)  # compiles
        tracemalloc.start()
        write_step(step, context, Buffers(), None, lambda output, array, at: None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= working_set(step, plan.sources) + 100_000, (step.source, peak, working_set(step, plan.sources))
