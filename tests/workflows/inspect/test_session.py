"""Sessions: what is recorded of six tensors, when, and that the model stays as it is."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.core.errors import WriteError
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source

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
