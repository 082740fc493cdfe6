"""Sessions: what is noted, refused and left alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.core.errors import BridgeWarning, CalibrationError, InspectError, UsageError, WriteError
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.load import load_scheme
from bridge.sources.checkpoint import HfSource
from bridge.sources.opening import open_source
from bridge.workflows.inspect import verbs
from tests.workflows.inspect.test_session import GPT2, IDS, LLAMA, batch, config, values


def test_a_tensor_that_loses_nothing_is_the_best() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(16, 16))
    settings = config("LogQuantizedTensorStats", tensors=["weight"], stats=["int8_sqnr"])
    with bridge.inspecting(model, settings) as session, torch.no_grad():
        model(torch.ones(1, 16))
        session.step()
    seen = session.inspection
    assert [record.layer for record in seen.worst("sqnr")] == ["1", "0"]
    assert seen.worst("sqnr")[-1].value == 200.0 and "0" not in seen.recipe(base="int8_wo").partition("modules")[2]


@pytest.mark.parametrize("architectures", [None, []])
def test_gradients_of_a_model_of_no_architecture_are_refused(architectures: Any) -> None:
    source = open_source(LLAMA)
    source.config["architectures"] = architectures
    assert not verbs._predicts(source)


def test_what_was_due_and_not_seen_is_noted() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    model = Two()
    with bridge.inspecting(model, config(tensors=["output", "wgrad"], stats=["rms"])) as session:
        model(torch.ones(1, 4))
        session.step()
    notes = session.inspection.notes
    assert any(note.startswith("output was due and not seen") and note.endswith("1 layer (idle)") for note in notes)
    assert any(
        note.startswith("wgrad was due and not seen") and note.endswith("2 layers (idle, used)") for note in notes
    )
    (what,) = [what for what in session.inspection.noted if what.startswith("wgrad")]
    assert json.loads(session.inspection.to_json())["noted"][what] == ["idle", "used"]


def test_a_module_whose_weight_another_uses_is_said_not_to_be_called() -> None:
    class Mixer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dt_proj = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return x @ self.dt_proj.weight.T

    model = torch.nn.ModuleDict({f"{at}": Mixer() for at in range(9)})
    model.forward = lambda x: [mixer(x) for mixer in model.values()]
    with bridge.inspecting(model, config(tensors=["activation"], stats=["rms"])) as session:
        model(torch.ones(1, 4))
        session.step()
    (note,) = session.schemes.note_lines()
    assert "its module was not called (another one may use its weight)" in note
    assert note.endswith(": 9 layers ({0..8}.dt_proj)")


def test_a_wrapped_model_and_tensors_of_inference_are_seen() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4))

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = inner

        def forward(self, x: Any) -> Any:
            return self.module(x)

    with bridge.inspecting(Wrapper(), config(tensors=["output"], stats=["rms"])) as session, torch.inference_mode():
        model = session.model
        model(torch.ones(1, 4))
        session.step()
    assert [record.layer for record in session.inspection.records] == ["0"]


def test_convolutions_are_matrices_of_their_outputs() -> None:
    layer = torch.nn.Conv2d(3, 8, 3)
    settings = config("LogQuantizedTensorStats", tensors=["weight", "activation"], stats=["int8_wo_sqnr", "int8_sqnr"])
    with bridge.inspecting(torch.nn.Sequential(layer), settings) as session, torch.no_grad():
        session.model(torch.randn(1, 3, 8, 8))
        session.step()
    x, numeric = layer.weight.detach().flatten(1).numpy(), load_scheme("int8_wo").weight
    v = decode(encode(x, "float32", numeric, name="w"), numeric, x.shape)
    sqnr = 10 * math.log10(np.square(x).sum() / np.square(v - x).sum())
    told = values(session)
    assert told[0, "0", "weight", "int8_wo_sqnr"] == pytest.approx(sqnr, rel=1e-4)
    assert (0, "0", "activation", "int8_sqnr") not in told
    assert any("convolution's activation has no losses" in note for note in session.inspection.notes)


def test_rows_without_whole_blocks_of_a_scheme_are_noted() -> None:
    """The loop goes on; other layers have their values."""
    model = torch.nn.Sequential(torch.nn.Linear(48, 256), torch.nn.Linear(256, 4))
    settings = config("LogQuantizedTensorStats", tensors=["weight"], stats=["q4_k_sqnr", "int8_wo_sqnr"])
    with bridge.inspecting(model, settings) as session, torch.no_grad():
        model(torch.randn(2, 48))
        session.step()
    assert [(record.layer, record.stat) for record in session.inspection.records] == [
        ("0", "int8_wo_sqnr"), ("1", "q4_k_sqnr"), ("1", "int8_wo_sqnr"),
    ]  # fmt: skip
    assert "weight has no rows of whole blocks of 256, which a scheme needs: 1 layer (0)" in session.inspection.notes


def test_blocks_that_do_not_divide_are_noted() -> None:
    stat = {"max_blockwise_dynamic_range": {"block_size": 8, "dims": 2}}
    with bridge.inspecting(
        torch.nn.Sequential(torch.nn.Linear(16, 16)), config(tensors=["activation", "weight"], stats=[stat])
    ) as session:
        session.model(torch.randn(7, 16))
        session.step()
    assert [record.tensor for record in session.inspection.records] == ["weight"]
    assert any("a block does not divide activation" in note for note in session.inspection.notes)


def test_layers_that_a_recipe_keeps_have_no_losses(tmp_path: Path) -> None:
    few: dict[str, Any] = {"samples": 2, "sequence": 32, "progress": False}
    recipe = tmp_path / "kept.toml"
    recipe.write_text('base = "int4_wo"\n[[rule]]\nroles = ["mlp.down.weight"]\nquant = "none"\n')
    seen = bridge.inspect(LLAMA, quant=recipe, **few)
    layers = {record.layer for record in seen.records if record.stat == "sqnr"}
    assert "model.layers.0.mlp.up_proj" in layers and "model.layers.0.mlp.down_proj" not in layers
    with pytest.raises(InspectError, match="rules for layers"), bridge.inspecting(torch.nn.Linear(2, 2), quant=recipe):
        pass


def test_the_callers_model_stays_as_it_is() -> None:
    model = open_source(LLAMA).load_model().train()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    settings = config(tensors=["wgrad"], stats=["rms"])
    bridge.inspect(model, settings, data=[batch(), batch(1)], gradients=True, progress=False)
    assert model.training and all(bool((param.grad == 1).all()) for param in model.parameters())


def test_calibrations_of_other_inputs_are_refused() -> None:
    settings = config("LogQuantizedTensorStats", tensors=["activation"], stats=["fp8_sqnr"])
    smoothed = bridge.calibrate(LLAMA, "int8_sq", samples=2, sequence=32, progress=False)
    with pytest.raises(InspectError, match="smoothed inputs"):
        bridge.inspect(LLAMA, settings, calib=smoothed, progress=False)
    other = bridge.calibrate(GPT2, "fp8", samples=2, sequence=32, progress=False)
    with pytest.raises(InspectError, match="no layer of this model"):
        bridge.inspect(LLAMA, settings, calib=other, progress=False)


def test_a_loop_that_was_killed_keeps_its_lines(tmp_path: Path) -> None:
    (tmp_path / "seen.steps.jsonl").write_text("{}\n")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(WriteError, match="left from a loop"), bridge.inspecting(model, out=tmp_path / "seen"):
        pass
    assert (tmp_path / "seen.steps.jsonl").read_text() == "{}\n"


def test_what_has_no_value_is_noted() -> None:
    few: dict[str, Any] = {"samples": 2, "sequence": 32, "progress": False}
    seen = bridge.inspect(LLAMA, quant="int4_wo", **few)
    assert any("the scheme leaves activation as it is" in note for note in seen.notes)
    awq = bridge.inspect(LLAMA, quant="int4_awq", **few)
    assert any("what calibration chooses for awq is not applied" in note for note in awq.notes)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"config": config(tensors=["activation"], stats=["sqnrr"])}, InspectError, "unknown"),
        ({"config": config("DumpTensors", tensors=["weight"], high_precision_tensor=True)}, InspectError,
         "DumpTensors: writes the tensors into a directory; pass out="),
        ({"against": "out", "quant": "fp8"}, UsageError, "does not go with against="),
        ({"steps": 0}, UsageError, "steps=0"),
        ({"config": config(tensors=["output"], stats=["rms"], start_step=50)}, InspectError, "nothing is due"),
        ({"config": config(tensors=["wgrad"], stats=["rms"])}, InspectError, "pass gradients=True"),
        ({"config": config(tensors=["output"], stats=["rms"], start_step=50), "data": [{"input_ids": IDS}]},
         InspectError, "in the 2 steps that run: a step is a batch of data=, or of at most 8 rows"),
        ({"data": lambda model: None}, UsageError, "bridge.inspecting"),
        ({"data": {}}, CalibrationError, "is empty; give batches"),
        ({"data": [{}]}, CalibrationError, "is empty; give batches"),
        ({"data": [{"labels": IDS}]}, CalibrationError, "has only labels"),
        ({"device": "gpu"}, UsageError, "device 'gpu' is unknown"),
        ({"device": "cuda:99"}, UsageError, "CUDA devices here"),
        ({"out": 5}, UsageError, "out=5"),
        ({"out": "pyproject.toml/a/seen"}, WriteError, "cannot be written: .*pyproject.toml: Not a directory"),
        ({"sink": 3}, UsageError, "sink=3"),
        ({"feature_dirs": [3]}, UsageError, "feature_dirs=3"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_a_model_is_loaded(
    given: dict[str, Any], error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HfSource, "load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(error, match=said):
        bridge.inspect(LLAMA, given.pop("config", None), progress=False, **given)


def test_a_loop_that_told_nothing_warns_that_nothing_is_written(tmp_path: Path) -> None:
    model, words = torch.nn.Sequential(torch.nn.Linear(4, 2)), config(tensors=["weight"], stats=["max"])
    for steps, why in ((0, r"session\.step\(\) was never called"), (2, "nothing was seen in 2 steps")):
        with (
            pytest.warns(BridgeWarning, match=f"seen: is not written: {why}"),
            bridge.inspecting(model, words, out=tmp_path / "seen") as session,
        ):
            for _ in range(steps):
                session.step()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({}, UsageError, "expected a torch module; bridge.inspect takes the path"),
        ({"model": torch.nn.Linear(2, 2), "out": "pyproject.toml/seen"}, WriteError, "cannot be written"),
        ({"model": torch.nn.Linear(2, 2), "sink": 3}, UsageError, "sink=3"),
    ],
)
def test_a_loop_is_refused_what_is_no_argument(given: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said), bridge.inspecting(given.pop("model", "x"), None, quant="fp8", **given):
        pytest.fail("the loop began")


def test_fewer_steps_than_were_asked_for_are_noted() -> None:
    settings = config(tensors=["output"], stats=["rms"])
    seen = bridge.inspect(LLAMA, settings, data=[{"input_ids": IDS}], steps=5, progress=False)
    assert {record.step for record in seen.records} == {0, 1}
    assert any(note.startswith("steps=5 (--steps): the data make 2 steps") for note in seen.notes)
    exact = bridge.inspect(LLAMA, settings, data=[{"input_ids": IDS}], steps=2, progress=False)
    assert not any("--steps" in note for note in exact.notes)
