"""Calibrations that end in an error: no CUDA, no data, another model, NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bridge.calibration.data import prepare
from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import fake_quantize
from bridge.core.errors import CalibrationError
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source
from bridge.tables.architectures.structure import structure
from tests.models.calibrated_models import IDS, built, run


def test_cuda_that_is_needed_and_missing_is_an_error_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = open_source(built("llama"))
    arch, data = structure(source.config, source.specs), prepare(IDS, source)
    monkeypatch.setattr(type(source), "load_model", lambda _: pytest.fail("loaded"))
    with pytest.raises(CalibrationError, match="no CUDA device here, and the kernel exists there only"):
        scheme = replace(load_scheme("fp8"), needs_cuda="the kernel exists there only")
        fake_quantize(CalibrationJob(source, arch, scheme, data))
    with pytest.raises(CalibrationError, match="device='cuda:0' was asked for"):
        fake_quantize(CalibrationJob(source, arch, load_scheme("fp8"), data, device="cuda:0"))


def test_data_that_are_missing_are_an_error_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(built("llama"))
    arch = structure(source.config, source.specs)
    monkeypatch.setattr(type(source), "load_model", lambda _: pytest.fail("loaded"))
    with pytest.raises(CalibrationError, match=r"scheme fp8 needs statistics of activations: .*tokenizer"):
        fake_quantize(CalibrationJob(source, arch, load_scheme("fp8"), prepare(None, source)))


def test_a_loop_that_runs_another_model_is_an_error() -> None:
    model = built("llama")
    with pytest.raises(CalibrationError, match=r"never seen: model.layers.\{0..1\}.*no calibration token"):
        run(model, load_scheme("fp8"), lambda twin: model(IDS[0]))


def test_activations_that_are_not_finite_are_an_error() -> None:
    model = built("llama")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[0] = float("inf")
    with pytest.raises(CalibrationError, match=r"infinity|not finite"):
        run(model, load_scheme("fp8"))
