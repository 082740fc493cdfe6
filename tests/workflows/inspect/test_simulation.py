"""A model under quant=: its logits are those of bridge's own output, and of ModelOpt's fake-quantized model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.calibration.reference_outputs import pick, runner  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.workflows.inspect.changes.layer_changes import Changes  # noqa: E402
from bridge.workflows.inspect.changes.simulation import formats_of, simulated  # noqa: E402
from bridge.workflows.inspect.collect import Schemes  # noqa: E402
from bridge.workflows.inspect.layers import EXPERT, layers_of  # noqa: E402
from bridge.workflows.inspect.twin import twin_of  # noqa: E402
from tests.models.calibrated_models import built  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402
from tests.workflows.inspect.formats_in_torch import config, disable, stats  # noqa: E402

LLAMA, GPT2 = "examples/models/tiny-llama", "examples/models/tiny-gpt2"
FEW: dict[str, Any] = {"samples": 4, "sequence": 32, "progress": False}
IDS = torch.arange(3, 75).reshape(3, 24)


def decibels(wanted: Any, found: Any) -> float:
    wanted, found = np.asarray(wanted, np.float64), np.asarray(found, np.float64)
    error = float(np.square(wanted - found).sum())
    return float(10 * np.log10(np.square(wanted).sum() / error)) if error else np.inf


def quantized_model(path: str, scheme: str, calibration: Calibration | None = None) -> tuple[Any, Changes, Schemes]:
    source, own = open_source(path), load_scheme(scheme)
    model = source.load_model().eval()
    schemes = Schemes(own)
    formats = formats_of(own, structure_of(source).sites, model, source.specs)
    changes = Changes(model, schemes, simulated(layers_of(model, source), formats, calibration, schemes))
    return model, changes, schemes


def logits(model: Any, ids: Any = IDS) -> Any:
    with torch.no_grad():
        return model(input_ids=ids).logits.float().numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "scheme"), [(LLAMA, "int4_wo"), (LLAMA, "mxfp8"), (LLAMA, "fp8_pc_pt"), (GPT2, "int8_wo")]
)
def test_logits_are_those_of_what_bridge_writes(path: str, scheme: str, tmp_path: Path) -> None:
    """Bit for bit where no two matrices share a scale in the target; Conv1D is summed in another order there."""
    model, changes, schemes = quantized_model(path, scheme)
    plain = logits(model)
    changes.attach({})
    found = logits(model)
    changes.detach()
    bridge.convert(path, out=tmp_path / "out", target="hf", quant=scheme, progress=False)
    written = logits(twin_of(tmp_path / "out", open_source(path)).model.eval())
    assert np.array_equal(found, written) if path == LLAMA else decibels(written, found) > 120
    assert 10 < decibels(plain, found) < 60 and np.array_equal(logits(model), plain) and not schemes.note_lines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "scheme", "close"),
    [
        (LLAMA, "fp8", 35),
        (GPT2, "int8_sq", 45),
        pytest.param(GPT2, "int4_awq_full", 120, marks=pytest.mark.product),
        (LLAMA, "nvfp4", 120),
    ],
)
def test_logits_are_those_of_modelopts_model(path: str, scheme: str, close: float) -> None:
    """Ties of static scales round otherwise in ModelOpt; the distance to the plain model is the same in 0.1 dB."""
    calibration = bridge.calibrate(path, scheme, samples=16, sequence=32, progress=False)
    held = calibration.held_out
    assert held
    model, changes, schemes = quantized_model(path, scheme, calibration)
    changes.attach({})
    inputs = {name: torch.from_numpy(array) for name, array in held.inputs[0].items()}
    found = pick(runner(model)(inputs), held.rows, held.columns)
    assert decibels(held.quantized, found) > close
    assert decibels(held.source, found) == pytest.approx(decibels(held.source, held.quantized), abs=0.1)
    assert not schemes.note_lines()


@pytest.mark.slow
def test_inspect_runs_the_scheme_and_sees_the_error_of_the_layers_before() -> None:
    layers = {"layer_types": ["layers.3.mlp.down_proj"]}
    settings = config(stats("activation", "output"), layers)
    plain = bridge.inspect(LLAMA, settings, **FEW)
    under = bridge.inspect(LLAMA, settings, quant="int4_wo", **FEW)
    out = config(disable(), {"layer_types": ["layers."]}) | {"t": settings["s"]}
    disabled = bridge.inspect(LLAMA, out, quant="int4_wo", **FEW)
    assert [record.value for record in disabled.records] == [record.value for record in plain.records]
    values = [(a.value, b.value) for a, b in zip(plain.records, under.records, strict=True)]
    assert values and all(a != b and a == pytest.approx(b, rel=0.3) for a, b in values)
    assert bridge.inspect(LLAMA, settings, quant="int4_wo", **FEW).records == under.records


@pytest.mark.slow
def test_a_smoothing_calibration_goes_with_its_scheme_only() -> None:
    calibration = bridge.calibrate(LLAMA, "int8_sq", **FEW)
    seen = bridge.inspect(LLAMA, config(stats("output")), quant="int8_sq", calib=calibration, **FEW)
    assert not [note for note in seen.notes if "not applied" in note]
    without = bridge.inspect(LLAMA, config(stats("output")), quant="int8_sq", **FEW)
    note = "what calibration chooses for smoothquant is not applied"
    assert len(without.noted[note]) == 35
    assert [r.value for r in seen.records] != [r.value for r in without.records]
    (name, *_) = calibration.smoothing_amax
    some = {key: value for key, value in calibration.smoothing_amax.items() if key != name}
    partly = dataclasses.replace(calibration, smoothing_amax=some)
    lacking = bridge.inspect(LLAMA, config(stats("output")), quant="int8_sq", calib=partly, **FEW)
    assert lacking.noted[note] == (name,)


def test_a_live_model_keeps_its_head_and_what_cannot_be_changed() -> None:
    model = built("mixtral")
    ids = torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(0))
    with bridge.inspecting(model, config(stats("output")), quant="int4_wo") as session, torch.no_grad():
        changed = {
            name for name, module in model.named_modules() if "forward" in vars(module) and "experts" not in name
        }
        model(input_ids=ids)
        session.step()
    watched = {f"model.layers.{n}.mlp.experts" for n in range(2)}
    assert changed - watched == {f"model.layers.{n}.self_attn.{kind}_proj" for n in range(2) for kind in "qkvo"}
    assert any(note.startswith("runs unquantized: an expert inside one module") for note in session.notes)


@pytest.mark.parametrize("family", ["GptOssForCausalLM", "DeepseekV3ForCausalLM"])
def test_experts_in_stacks_have_the_formats_of_the_checkpoints_matrices(family: str) -> None:
    source, own = open_source(build(family)), load_scheme("fp8")
    skeleton = source.load_skeleton()
    experts = [layer.name for layer in layers_of(skeleton, source) if layer.kind == EXPERT]
    formats = formats_of(own, structure_of(source).sites, skeleton, source.specs)
    assert experts and {formats.get(name) for name in experts} == {own.format}


def test_experts_have_statistics_under_the_scheme_and_a_note_that_they_run_as_they_are() -> None:
    data = [{"input_ids": torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(0))}]
    seen = bridge.inspect(built("mixtral"), quant="fp8", data=data, progress=False)
    names = {record.layer for record in seen.records if record.stat == "sqnr" and record.tensor == "weight"}
    assert "model.layers.1.mlp.experts.3.gate_up_proj" in names and "lm_head" not in names
    (note,) = [note for note in seen.notes if note.startswith("runs unquantized: an expert inside one module")]
    assert "20 layers" in note


def test_training_under_a_scheme_moves_the_weights_and_quantizes_them_anew() -> None:
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)),
        torch.randn(64, 128),
    )
    wanted, losses = x[:, :1].sign(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with bridge.inspecting(model, config(stats("weight", freq=10)), quant="nvfp4") as session:
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - wanted).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            session.step()
    assert losses[-1] < 0.5 * losses[0] and len(session.inspection.records) == 4
