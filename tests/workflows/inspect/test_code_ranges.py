"""The magnitudes that a scheme makes zero are those that its encoder makes zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.quant.calibration import Calibration, Provenance  # noqa: E402
from bridge.quant.schemes.catalog import named_scheme  # noqa: E402
from bridge.workflows.inspect.result import Inspection, Magnitudes  # noqa: E402
from bridge.workflows.inspect.statistics.coding import fake_quantized  # noqa: E402
from bridge.workflows.inspect.statistics.quantization import of_scheme  # noqa: E402


def inspected(x: Any, tensor: str, stats: list[str], **options: Any) -> Inspection:
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], x.shape[0], bias=False))
    model[0].weight.data = x.clone()
    logs = {
        "LogTensorStats": {"enabled": True, "tensors": [tensor], "stats": ["histogram"]},
        "LogQuantizedTensorStats": {"enabled": True, "tensors": [tensor], "stats": stats},
    }
    config = {"all": {"enabled": True, "layers": {"layer_types": ["all"]}, "bridge": logs}}
    with bridge.inspecting(model, config, **options) as session:
        model(x)
        session.step()
    return session.inspection


def spread() -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 128, generator=generator) * 2.0 ** torch.randint(-20, 3, (64, 128), generator=generator)


@pytest.mark.parametrize("scheme", ["fp8", "int8", "nvfp4", "mxfp8", "int4_wo", "mxfp4_wo"])
def test_what_lies_below_becomes_zero_and_what_lies_above_does_not(scheme: str) -> None:
    x = spread()
    seen = inspected(x, "weight", [f"{scheme}_underflows%"])
    (found,) = seen.magnitudes[0].ranges
    how = of_scheme(named_scheme(scheme), "weight")
    assert how and found.scheme == scheme and found.cut_above is None
    values, size = fake_quantized(x.numpy(), "float32", how), np.abs(x.numpy())
    assert not values[size < found.zero_below].any() and (size < found.zero_below).any()
    assert values[size > found.kept_from].all() and (size > found.kept_from).any()
    if how.numeric[0].per == "tensor":
        assert found.zero_below == found.kept_from
        (record,) = seen.records
        assert record.value == pytest.approx(100 * np.mean((size < found.zero_below) & (size > 0)), abs=0.02)
    else:
        assert found.zero_below < found.kept_from


def test_a_static_scale_cuts_off_at_its_amax() -> None:
    x = spread()
    made = Provenance("fp8", "", "Sequential", "", "float32", "", 1, 64)
    calib = Calibration(made, input_amax={"0": np.array(1.5, np.float32)})
    seen = inspected(x, "activation", ["overflows%", "sqnr"], quant="fp8", calib=calib)
    (found,) = seen.magnitudes[0].ranges
    assert (found.scheme, found.cut_above) == ("fp8", 1.5)
    assert seen.records[0].value == pytest.approx(100 * float((x.abs() > 1.5).double().mean()))


def test_blocks_with_a_least_value_have_no_range() -> None:
    assert inspected(spread(), "weight", ["q8_0_sqnr", "fp8_sqnr"]).magnitudes[0].ranges[-1].scheme == "fp8"


def test_the_default_config_counts_magnitudes_of_each_tensor() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    with bridge.inspecting(model) as session:
        model(torch.ones(4, 64))
        session.step()
    rows = session.inspection.magnitudes
    assert [(row.layer, row.tensor) for row in rows] == [("0", "activation"), ("0", "weight")]
    assert rows[0] == Magnitudes(0, "0", "activation", ((0, 256),), 0, rows[0].ranges)
    assert [found.scheme for found in rows[0].ranges] == ["fp8", "int8", "nvfp4", "mxfp8"]
