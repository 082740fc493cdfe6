"""What is NaN, infinite, or beyond float32."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.workflows.inspect.result import base_of  # noqa: E402
from tests.workflows.inspect.test_session import config  # noqa: E402


def seen_of(bad: float, feature: str, stats: list[str], dtype: Any = torch.float32) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, dtype=dtype), torch.nn.Linear(16, 16, dtype=dtype))
    x = torch.ones(2, 16, dtype=dtype)
    with bridge.inspecting(model, config(feature, tensors=["activation"], stats=stats)) as session, torch.no_grad():
        model(x)
        session.step()
        x[1, 3] = bad
        model(x)
        session.step()
    return session.inspection


@pytest.mark.parametrize("stat", ["fp8_sqnr", "fp8_mse", "mxfp8_underflows%", "fp8_cosine"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_quantization_statistics_tell_a_nan(bad: float, stat: str) -> None:
    seen = seen_of(bad, "LogQuantizedTensorStats", [stat])
    values = [record.value for record in seen.records]
    assert values[0] is not None and values[2:] == [None, None] and not seen.finite
    assert seen.worst(stat, n=1)[0].step == 1
    assert "1 value of activation of 0 NaN or infinite at step 1, the first seen" in seen.notes


def test_scales_of_zeros_are_not_called_bad() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    stats = ["nvfp4_scale_underflows%", "mxfp8_scale_min", "nvfp4_sqnr"]
    with bridge.inspecting(
        model, config("LogQuantizedTensorStats", tensors=["activation"], stats=stats), quant="nvfp4"
    ) as session:
        model(torch.zeros(2, 16))
        session.step()
    assert session.inspection.finite and session.inspection.records[0].value is None
    assert base_of("scale_underflows%") == base_of("nvfp4_scale_underflows%") == "scale_underflows%"


def test_numbers_beyond_float32_are_finite() -> None:
    seen = seen_of(-1e300, "LogTensorStats", ["inf%", "min"], torch.float64)
    first = {record.stat: record.value for record in seen.records if (record.step, record.layer) == (1, "0")}
    assert first == {"inf%": 0.0, "min": torch.finfo(torch.float32).min} and seen.finite
    assert any("beyond float32" in note for note in seen.notes)
    assert not seen_of(math.inf, "LogTensorStats", ["inf%"], torch.float64).finite
