"""What fails inside a block is told with the block and its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

from bridge.calibration.data import prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.walk.run import calibrate_by_blocks  # noqa: E402
from bridge.core.errors import CalibrationError  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.calibration.walk.walked_models import batches  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402


@pytest.mark.slow
def test_nan_is_named_with_the_block_that_makes_it(tmp_path: Path) -> None:
    model = build("LlamaForCausalLM", torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    structure = structure_of(source)
    scheme, data = load_scheme("fp8").bound(structure.sites), prepare(batches(), source)
    with pytest.raises(CalibrationError, match=r"^model.layers.1.mlp.up_proj makes NaN of .*: its weight holds"):
        calibrate_by_blocks(CalibrationJob(source, structure, scheme, data))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nan inside", r"^model.layers.1.mlp.act_fn makes NaN of .* check the data"),
        ("infinity inside", r"^model.layers.1.mlp.act_fn makes infinity of .* check the data"),
        ("no nan", r"^model.layers.1: ModelOpt refused: odd shape; its weights and activations are finite: choose"),
        ("an index", r"^model.layers.1: ModelOpt failed on this model \(IndexError: odd shape\); choose a scheme"),
        ("own forward", r"^LlamaForCausalLM cannot be run on .* \(ValueError in model.layers.1.mlp.act_fn: odd rows\)"),
        (
            "own forward, held out",
            r"^LlamaForCausalLM cannot be run on .* \(ValueError in model.layers.1.mlp.act_fn: odd rows\)",
        ),
        ("unknown", "^odd shape"),
    ],
)
def test_a_failure_inside_a_block_is_told_with_its_reason(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first layer nothing fails: the second has another activation function."""
    from modelopt.torch.quantization.calib import MaxCalibrator

    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    structure = structure_of(source)
    scheme, data = load_scheme("fp8").bound(structure.sites), prepare(batches(), source)
    skeleton = type(source).load_skeleton
    reached: list[bool] = []

    class Odd(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            reached.append(True)
            if kind.startswith("own forward"):
                raise ValueError("odd rows")
            factor = {"nan inside": float("nan"), "infinity inside": float("inf")}.get(kind, 1.0)
            return rows.abs() * factor + 1 if "inside" in kind else rows

    def built(self: Any) -> Any:
        model = skeleton(self)
        model.model.layers[1].mlp.act_fn = Odd()
        return model

    def refusing(collect: Any, error: type[Exception]) -> Any:
        def refuse(self: Any, rows: Any) -> Any:
            if reached:
                raise error("odd shape")
            return collect(self, rows)

        return refuse

    monkeypatch.setattr(type(source), "load_skeleton", built)
    if error := {"no nan": AssertionError, "an index": IndexError, "unknown": ZeroDivisionError}.get(kind):
        monkeypatch.setattr(MaxCalibrator, "collect", refusing(MaxCalibrator.collect, error))
    if not kind.endswith("held out"):
        data = replace(data, held_out=())
    with pytest.raises(ZeroDivisionError if kind == "unknown" else CalibrationError, match=said) as raised:
        calibrate_by_blocks(CalibrationJob(source, structure, scheme, data))
    assert kind != "unknown" or raised.value.__notes__ == ["in model.layers.1.mlp.up_proj.input_quantizer"]
