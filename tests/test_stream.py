"""The stream writes what the plan says, the same bytes on any number of threads, and no bad number."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import bridge.api as api
from bridge.container import SafetensorsFile
from bridge.conversion import Conversion
from bridge.errors import SourceError
from bridge.output import output_directory
from bridge.quant.calibration import Calibration, Provenance
from bridge.stream import run
from tests.sources_made import MadeSource, made_llama

PROVENANCE = Provenance("", "", "", "", "", "", 0, 0)
DOWN = "model.layers.1.mlp.down_proj"


def stream(
    source: MadeSource, quant: str | None, out: Path, workers: int = 2, memory: int = 1 << 30, **options: object
) -> SafetensorsFile:
    """Stream a whole model of made-up statistics into `out`."""
    structure = api._structure(source)
    scheme = api._scheme(quant, None, structure)
    plan = api._plan(source, structure, "trt", scheme, options)
    modules = {s.site.module: s.site for s in plan.quantized if s.site}
    wide = {n: np.linspace(1, 3, source.specs[site.weight].shape[1], dtype=np.float32) for n, site in modules.items()}
    calibration = Calibration(PROVENANCE, dict.fromkeys(modules, np.array(4, np.float32)), wide, wide)
    with output_directory(out, plan.digest) as work:
        conversion = Conversion(plan, source, calibration, scheme, memory, work, workers)
        run(conversion, work.directory / "model.safetensors", threading.Event())
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
