"""What inspection says a tensor loses is what it loses in ModelOpt's quantized model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.quant.schemes.catalog import named_scheme  # noqa: E402
from tests.models.calibrated_models import IDS, both, built  # noqa: E402

pytestmark = pytest.mark.slow  # ModelOpt loads in seconds


def sqnr(x: Any, quantized: Any) -> float:
    x, error = x.double(), (quantized - x).double()
    return 10 * math.log10(float(x.square().sum() / error.square().sum()))


@pytest.mark.parametrize("scheme", ["fp8", "int8_wo"])
def test_losses_are_those_of_the_twin_of_modelopt(scheme: str) -> None:
    fake = both(built("llama"), named_scheme(scheme))
    stats = {"enabled": True, "tensors": ["activation", "weight"], "stats": ["sqnr"]}
    config = {"s": {"enabled": True, "layers": {"layer_types": ["all"]}, "bridge": {"LogQuantizedTensorStats": stats}}}
    inputs: dict[str, Any] = {}
    model = fake.plain.eval()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, given, name=name: inputs.__setitem__(name, given))
    with (
        bridge.inspecting(model, config, quant=scheme, calib=fake.calibration if scheme == "fp8" else None) as session,
        torch.no_grad(),
    ):
        model(IDS[0])
        session.step()
    compared = 0
    for record in session.inspection.records:
        twin = fake.model.get_submodule(record.layer)
        weight = record.tensor == "weight"
        quantizer = twin.weight_quantizer if weight else twin.input_quantizer
        if not quantizer.is_enabled:  # the head, which the scheme leaves as it is
            continue
        x = twin.weight if weight else inputs[record.layer][0]
        with torch.no_grad():
            assert record.value == pytest.approx(sqnr(x, quantizer(x)), abs=0.1), record
        compared += 1
    assert compared == 14 * (2 if scheme == "fp8" else 1)
