"""Sessions: what is recorded of six tensors, when, and that the model stays as it is."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.core.errors import BridgeWarning, CalibrationError, InspectError, UsageError, WriteError  # noqa: E402
from bridge.quant.codec.decode import decode  # noqa: E402
from bridge.quant.codec.encode import encode  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.checkpoint import HfSource  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.workflows.inspect import verbs  # noqa: E402

IDS = torch.arange(3, 35).reshape(2, 16)
LLAMA, GPT2 = "examples/models/tiny-llama", "examples/models/tiny-gpt2"
SIX = ["activation", "weight", "output", "gradient", "dgrad", "wgrad"]


def config(feature: str = "LogTensorStats", layers: Any = None, **options: Any) -> dict[str, Any]:
    chosen = {"enabled": True, **options}
    return {
        "s": {"enabled": True, "layers": layers or {"layer_types": ["all"]}, "transformer_engine": {feature: chosen}}
    }


def batch(seed: int = 0, rows: int = 2) -> dict[str, Any]:
    ids = torch.randint(3, 500, (rows, 20), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def values(session: Any) -> dict[tuple[int, str, str, str], float | None]:
    return {(r.step, r.layer, r.tensor, r.stat): r.value for r in session.inspection.records}


def test_values_are_those_of_the_tensors() -> None:
    """One layer by hand: two microbatches in a step, their rows together; the gradient of a weight after each."""
    layer, inputs = (
        torch.nn.Linear(6, 5),
        [torch.randn(4, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)],
    )
    model = torch.nn.Sequential(layer)
    with bridge.inspecting(model, config(tensors=SIX, stats=["l2_norm", "numel", "std"])) as session:
        for x in inputs:
            model(x).square().sum().backward()
        session.step()
    told = values(session)
    x = torch.cat(inputs).detach().double()
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    out = x @ weight.T + bias
    parts = [2 * out[:4].T @ x[:4], 2 * out[4:].T @ x[4:]]
    expected = {
        "activation": x, "weight": weight, "output": out, "gradient": 2 * out, "dgrad": 2 * out @ weight,
        "wgrad": torch.stack(parts),
    }  # fmt: skip
    for name, tensor in expected.items():
        assert told[0, "0", name, "numel"] == tensor.numel()
        assert told[0, "0", name, "l2_norm"] == pytest.approx(float(tensor.norm()), rel=1e-5)
        assert told[0, "0", name, "std"] == pytest.approx(float(tensor.std()), rel=1e-5)


@pytest.mark.parametrize("path", [LLAMA, GPT2])
def test_bits_are_those_of_a_model_that_is_not_inspected(path: str) -> None:
    def train(model: Any, session: Any = None) -> list[Any]:
        found = []
        for n in range(3):
            model.zero_grad()
            out = model(**batch(n))
            out.loss.backward()
            found += [out.logits.detach(), *(param.grad.clone() for param in model.parameters())]
            if session:
                session.step()
        return found

    plain = train(open_source(path).load_model().eval())
    model = open_source(path).load_model().eval()
    with bridge.inspecting(model, config(tensors=SIX, stats=["rms"], freq=2)) as session:
        seen = train(model, session)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    records = session.inspection.records
    assert {record.step for record in records} == {0, 2} and {record.tensor for record in records} == set(SIX)
    hooks = ("_forward_pre_hooks", "_forward_hooks")
    assert not any(vars(module)[name] for module in model.modules() for name in hooks)
    assert not any(param._backward_hooks for param in model.parameters())


def test_a_step_at_which_nothing_is_due_has_no_hooks() -> None:
    model = open_source(LLAMA).load_model()
    with bridge.inspecting(model, config(tensors=["output"], stats=["rms"], start_step=2, end_step=2)) as session:
        for step in range(4):
            hooked = [name for name, module in model.named_modules() if module._forward_hooks]
            assert bool(hooked) == (step == 2)
            model(**batch())
            session.step()
    assert {record.step for record in session.inspection.records} == {2}


def test_an_exception_in_the_loop_takes_the_hooks_off_and_keeps_what_was_told(tmp_path: Path) -> None:
    model = open_source(LLAMA).load_model()
    with (
        pytest.raises(KeyboardInterrupt),
        bridge.inspecting(model, config(tensors=["output"], stats=["rms"]), out=tmp_path / "seen") as session,
    ):
        model(**batch())
        session.step()
        lines = (tmp_path / "seen.steps.jsonl").read_text().splitlines()
        assert json.loads(lines[0])["stat"] == "rms"
        model(**batch())
        raise KeyboardInterrupt
    assert not any(module._forward_hooks for module in model.modules())
    told = json.loads((tmp_path / "seen/inspect.json").read_text())
    assert len(told["records"]) == len(lines) and not (tmp_path / "seen.steps.jsonl").exists()
    with pytest.raises(WriteError, match="exists"), bridge.inspecting(model, out=tmp_path / "seen"):
        pass


def test_padding_does_not_count() -> None:
    model = open_source(LLAMA).load_model().eval()
    ids = batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, 12:] = 0  # behind: the tokens before see none of it
    settings = config(tensors=["activation", "output"], stats=["numel", "cur_amax"], layers={"roles": ["mlp.down"]})
    told = []
    for inputs in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:, :12]}):
        with bridge.inspecting(model, settings) as session, torch.no_grad():
            model(**inputs)
            session.step()
        told.append([record.value for record in session.inspection.records])
    assert told[0] == pytest.approx(told[1], rel=1e-5) and len(told[0]) == 5 * 4


@pytest.mark.parametrize("scheme", ["fp8", "int8", "nvfp4", "mxfp8", "int4_wo"])
def test_losses_are_those_of_the_encoder(scheme: str) -> None:
    model = open_source(LLAMA).load_model()
    settings = config("LogQuantizedTensorStats", tensors=["weight"], stats=[f"{scheme}_sqnr", f"{scheme}_mse"])
    with bridge.inspecting(model, settings) as session, torch.no_grad():
        model(**batch())
        session.step()
    name = "model.layers.1.mlp.up_proj"
    x, numeric = model.get_submodule(name).weight.detach().numpy(), load_scheme(scheme).weight
    v = decode(encode(x, "float32", numeric, name="w"), numeric, x.shape)
    error = np.square(v.astype(np.float64) - x).sum()
    told = values(session)
    sqnr = 10 * math.log10(np.square(x.astype(np.float64)).sum() / error)
    assert told[0, name, "weight", f"{scheme}_sqnr"] == pytest.approx(sqnr, rel=1e-5)
    assert told[0, name, "weight", f"{scheme}_mse"] == pytest.approx(error / x.size, rel=1e-4)


def test_layers_that_read_one_tensor_share_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.workflows.inspect import collect

    count = [0]
    plain = collect.TensorSums.add

    def add(self: Any, *given: Any) -> None:
        count[0] += 1
        plain(self, *given)

    monkeypatch.setattr(collect.TensorSums, "add", add)
    blocks = {"max_blockwise_dynamic_range": {"block_size": 4, "dims": 1}}
    model = open_source(LLAMA).load_model()
    roles = {"roles": ["attn.q", "attn.k", "attn.v"], "layer_numbers": [0]}
    with (
        bridge.inspecting(
            model, config(tensors=["activation", "weight"], stats=["rms", blocks], layers=roles)
        ) as session,
        torch.no_grad(),
    ):
        model(**batch())
        session.step()
    found = [record.value for record in session.inspection.records if record.tensor == "activation"]
    assert count == [1 + 3]  # the activation, three weights; blocks cost no second pass
    assert len(found) == 2 * 3 and len(set(found)) == 2


def test_schemes_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.quant.schemes import catalog

    names: list[str] = []
    plain = catalog.read_scheme

    def read(path: Any, *rest: Any) -> Any:
        names.append(str(path))
        return plain(path, *rest)

    model = open_source(LLAMA).load_model()
    settings = config("LogQuantizedTensorStats", tensors=["weight"], stats=["fp8_sqnr", "fp8_mse", "mxfp8_sqnr"])
    with bridge.inspecting(model, settings) as session, torch.no_grad():
        model(**batch())
        monkeypatch.setattr(catalog, "read_scheme", read)
        session.step()
    assert not names


def test_a_weight_is_summed_again_after_it_changed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with bridge.inspecting(model, config(tensors=["weight"], stats=["l2_norm"])) as session:
        for step in range(3):
            model(torch.ones(1, 4))
            session.step()
            if step == 1:
                model[0].weight.data.mul_(2)  # torch does not count this write
    first, second, third = (record.value for record in session.inspection.records)
    assert first == second and third == pytest.approx(2 * (first or 0))


def test_a_sink_gets_each_value() -> None:
    told: list[tuple[str, float, int]] = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    settings = config(tensors=["output"], stats=["rms"])
    with bridge.inspecting(model, settings, sink=lambda *value: told.append(value)) as session:
        model(torch.ones(1, 4))
        session.step()
    (record,) = session.inspection.records
    assert told == [("0_output_rms", record.value, 0)]


def test_a_step_that_a_sink_breaks_has_ended() -> None:
    def sink(*_: Any) -> None:
        if session.current == 1:
            raise OSError("no connection")

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with bridge.inspecting(model, config(tensors=["output"], stats=["rms"]), sink=sink) as session:
        model(torch.ones(1, 4))
        with pytest.raises(OSError, match="no connection"):
            session.step()
        model(torch.ones(1, 4))
        session.step()
    assert [record.step for record in session.inspection.records] == [0, 1]


def test_the_verb_runs_batches_and_gradients(tmp_path: Path) -> None:
    few: dict[str, Any] = {"samples": 16, "sequence": 32, "progress": False}
    seen = bridge.inspect(LLAMA, config(tensors=["activation", "wgrad"], stats=["rms"]), steps=2, gradients=True, **few)
    assert {(record.step, record.tensor) for record in seen.records} == {
        (step, tensor) for step in (0, 1) for tensor in ("activation", "wgrad")
    }
    default = bridge.inspect(LLAMA, steps=1, out=tmp_path / "seen", **few)
    stats = {record.stat for record in default.records}
    assert stats >= {"cur_amax", "p99.9", "fp8_sqnr", "int8_cosine", "nvfp4_underflows%", "mxfp8_sqnr"}
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == [
        "inspect.html",
        "inspect.json",
        "statistics.csv",
    ]
    assert {record.tensor for record in default.records} == {"activation", "weight"}
    levels = {
        s: np.median([r.value or 0 for r in default.records if r.stat == f"{s}_sqnr"]) for s in ("fp8", "int8", "nvfp4")
    }
    assert levels["nvfp4"] < levels["fp8"] < levels["int8"] or levels["nvfp4"] < levels["int8"] < levels["fp8"]


def test_static_scales_of_a_calibration_cut_off_what_lies_beyond() -> None:
    calibration = bridge.calibrate(LLAMA, "fp8", samples=4, sequence=32, progress=False)
    for module in calibration.input_amax:
        calibration.input_amax[module][...] *= 0.1
    settings = config("LogQuantizedTensorStats", tensors=["activation"], stats=["overflows%"])
    few: dict[str, Any] = {"samples": 4, "sequence": 32, "progress": False, "quant": "fp8"}
    own = bridge.inspect(LLAMA, settings, **few)
    cut = bridge.inspect(LLAMA, settings, calib=calibration, **few)
    assert all(record.value == 0 for record in own.records)
    assert any("static scales without a calibration" in note for note in own.notes)
    after_norms = [record.value for record in cut.records if record.layer.endswith(("q_proj", "up_proj"))]
    assert after_norms and all(value is not None and value > 0.5 for value in after_norms)  # others read less


def test_a_mask_goes_with_its_forward() -> None:
    """Two forwards with other masks, one of them by position, then one backward."""
    model = open_source(LLAMA).load_model().eval()
    ids = batch()["input_ids"]
    masks = [torch.ones_like(ids), torch.ones_like(ids)]
    masks[0][:, 10:], masks[1][:, 5:] = 0, 0
    settings = config(tensors=["output", "gradient"], stats=["numel"], layers={"roles": ["mlp.down"]})
    with bridge.inspecting(model, settings) as session:
        outs = [model(input_ids=ids, attention_mask=masks[0]).logits, model(ids, masks[1]).logits]
        sum(out.square().sum() for out in outs).backward()
        session.step()
    width = model.config.hidden_size
    assert {record.value for record in session.inspection.records} == {2 * (10 + 5) * width}


def test_threads_have_their_own_masks() -> None:
    """A forward without a mask runs whole while another, with one, waits in its embedding."""
    model = open_source(LLAMA).load_model().eval()
    ids = batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is other:
            inside.set()
            assert go_on.wait(60)

    def run() -> None:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask)

    other = threading.Thread(target=run)
    settings = config(tensors=["output"], stats=["numel"], layers={"roles": ["mlp.down"]})
    handle = model.get_input_embeddings().register_forward_hook(wait)
    with bridge.inspecting(model, settings) as session, torch.no_grad():
        other.start()
        assert inside.wait(60)
        model(input_ids=ids)
        go_on.set()
        other.join()
        session.step()
    handle.remove()
    width = model.config.hidden_size
    assert {record.value for record in session.inspection.records} == {2 * (20 + 8) * width}


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
    (note,) = session.schemes.told()
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
