"""What fails while the whole model runs is told with the module that it came from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
needs("modelopt")

import bridge  # noqa: E402
from bridge.api.sensitivity.divergence import measure  # noqa: E402
from bridge.calibration.reference_outputs import blaming, runner  # noqa: E402
from bridge.core.errors import CalibrationError  # noqa: E402
from bridge.core.progress import no_progress  # noqa: E402
from tests.calibration.walk.walked_models import batches  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402


class Odd(torch.nn.Module):
    """An activation that gives NaN, or that fails."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.kind == "raises":
            raise ValueError("odd rows")
        return rows.abs() * float("nan") if self.kind == "nan" else rows


def odd(kind: str) -> Any:
    model = build("LlamaForCausalLM", torch.float32)
    model.model.layers[1].mlp.act_fn = Odd(kind)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("nan", r"^model.layers.1.mlp.act_fn makes NaN of the data, which hold none before it: check the data, or"),
        ("raises", r"cannot be run on input_ids.* \(ValueError in model.layers.1.mlp.act_fn: odd rows\)"),
    ],
)
def test_calibrate_names_the_module(kind: str, told: str) -> None:
    with pytest.raises(CalibrationError, match=told):
        bridge.calibrate(odd(kind), "fp8", batches())


def test_sensitivity_names_the_module() -> None:
    with pytest.raises(
        CalibrationError,
        match=r"^the unquantized model \(Llama.*\) gives NaN for the held-out inputs: model.layers.1.mlp.act_fn makes",
    ):
        measure(odd("nan"), [], batches(), no_progress)


@pytest.mark.slow
@pytest.mark.parametrize("importance", ["weights", "output"])
def test_a_search_of_sizes_names_the_module(importance: str) -> None:
    """`weights` scores without data: the NaN comes up where the whole model is measured."""
    with pytest.raises(CalibrationError, match=r"^model.layers.1.mlp.act_fn makes NaN of the data"):
        bridge.search(odd("nan"), {"parameters": "80%"}, data=batches(), importance=importance)


def test_inputs_that_are_nan_are_told() -> None:
    """ModelOpt refuses them in the first quantizer."""

    def run(batch: Any) -> Any:
        raise AssertionError("negative values after abs")

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.forward = lambda rows: torch.nn.Sequential.forward(model, rows)
    with pytest.raises(CalibrationError, match=r"^the inputs of the model hold NaN; check the data$"):
        blaming(run, model)({"rows": torch.full((1, 2), float("nan"))})


def test_an_error_of_another_cause_is_left_alone() -> None:
    plain = odd("")

    def run(batch: Any) -> Any:
        raise AssertionError("odd shape")

    with pytest.raises(AssertionError, match="odd shape"):
        blaming(run, plain)(batches()[0])
    assert blaming(runner(plain), plain)(batches()[0]).shape[-1] == 97
