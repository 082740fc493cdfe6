"""Changed GEMMs in a loop: when they change, and that nothing is left behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import linear  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import bridge  # noqa: E402
from bridge.core.errors import InspectError  # noqa: E402
from bridge.workflows.inspect.changes.gemms import ChangedGemms  # noqa: E402
from tests.workflows.inspect.formats_in_torch import E4M3, E5M2, config, disable, equal, fake, fp8, mx, stats  # noqa: E402
from tests.workflows.inspect.test_changes import made, run  # noqa: E402

HALF = fake({"fprop": ["activation", "weight"]}, quant_format="MXFP8E4M3")


def twice(dtype: Any = None) -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32)).to(dtype)


def grads(model: Any) -> list[Any]:
    return [param.grad.clone() for param in model.parameters()]


def trained(model: Any, x: Any) -> list[Any]:
    """Output and gradients."""
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *grads(model)]


def test_changes_follow_their_schedule_layer_by_layer() -> None:
    model, x = twice(), torch.randn(5, 64)
    plain = model(x).detach()
    late = {"FakeQuant": {**HALF["FakeQuant"], "freq": 2, "start_step": 2, "end_step": 5}}
    settings = config(late, {"exact_layer_names": "0"}) | {
        "t": {"enabled": True, "layers": {"exact_layer_names": "2"}, "bridge": stats("activation", freq=3)}
    }
    with bridge.inspecting(model, settings) as session:
        for step in range(7):
            changed = ["forward" in vars(module) for module in model]
            assert changed == [step in (2, 4), False, False]
            assert torch.equal(model(x), plain) == (step not in (2, 4))
            session.step()
    assert [record.step for record in session.inspection.records] == [0, 3, 6]


def test_weights_are_quantized_again_after_each_update() -> None:
    model, x = twice(), torch.randn(5, 64)
    with bridge.inspecting(model, config(HALF)) as session:
        for step in range(4):
            now = [mx(E4M3)(model[at].weight.detach()) for at in (0, 2)]
            hidden = torch.tanh(linear(mx(E4M3)(x), now[0], model[0].bias))
            expected = linear(mx(E4M3)(hidden.detach()), now[1], model[2].bias)
            for _ in range(2):  # microbatches
                out = model(x)
                assert torch.equal(out, expected), step
                out.square().sum().backward()
            if step % 2:
                model[0].weight.data.add_(0.01)  # torch does not count it
                session.step()
            else:
                with torch.no_grad():
                    model[0].weight.add_(0.01)
            model[2].weight.grad.zero_()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeated_forward_has_the_same_values_and_is_counted_once(reentrant: bool) -> None:
    model, x = twice(), torch.randn(5, 64, requires_grad=True)
    every = fake({"fprop": ["activation", "weight"], "dgrad": ["gradient", "weight"]}, quant_format="FP8E4M3")
    features = every | stats("activation", "output", "gradient", name="numel")
    with bridge.inspecting(model, config(features)) as session:
        plain = trained(model, x)
        session.step()
        model.zero_grad()
        out = checkpoint(model, x, use_reentrant=reentrant)
        out.square().sum().backward()
        session.step()
    assert equal([out.detach(), *grads(model)], plain)
    records = session.inspection.records
    first = {(r.layer, r.tensor): r.value for r in records if r.step == 0}
    assert first == {(r.layer, r.tensor): r.value for r in records if r.step == 1} and len(first) == 6
    assert first["0", "activation"] == 5 * 64


def test_a_weight_that_is_used_twice_adds_both_gradients() -> None:
    torch.manual_seed(0)
    one, other = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    other.weight = one.weight
    model, x = torch.nn.Sequential(one, other, one), torch.randn(4, 32)
    with bridge.inspecting(model, config(fake({"wgrad": ["gradient"]}, quant_format="FP8E5M2"))):
        out = model(x)
        out.square().sum().backward()
    inputs, weight, gradient, total = [x], one.weight.detach(), 2 * out.detach(), 0
    for layer in (one, other):
        inputs.append(linear(inputs[-1], weight, layer.bias.detach()))
    for entered in reversed(inputs):
        total = total + fp8(E5M2)(gradient).t() @ entered
        gradient = gradient @ weight
    assert torch.allclose(one.weight.grad, total, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_operands_have_the_dtype_of_autocast(kind: str) -> None:
    model, x, _ = made(kind, torch.float32)
    gradient = torch.randn(2, 3, 128, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(model, x, gradient)
    layer = model["layer"]
    asked = set[Any]()

    def keep(_: str, __: str, tensor: Any) -> Any:
        asked.add(tensor.dtype)
        return tensor

    gemms = ChangedGemms(layer, keep)
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(run(model, x, gradient), plain)
        assert layer(**{"input" if kind == "linear" else "x": x}).dtype == torch.bfloat16
    gemms.detach()
    assert asked == {torch.bfloat16} and layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind(error: type[BaseException]) -> None:
    model, x = twice(), torch.randn(5, 64)
    plain = trained(model, x)
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}

    def fail(*_: Any) -> None:
        raise error

    with pytest.raises(error), bridge.inspecting(model, config(HALF | stats("output")), quant="int4_wo") as session:
        assert not equal(trained(model, x), plain)
        session.step()
        model[1].register_forward_hook(fail).id  # noqa: B018
        model(x)
    model[1]._forward_hooks.clear()
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    assert equal(trained(model, x), plain) and session.inspection.records


def test_statistics_of_inputs_are_before_and_of_results_after() -> None:
    model, x = twice(), torch.randn(5, 64)
    both = fake({"fprop": ["activation", "output"]}, quant_format="FP8E5M2")
    settings = config(both | stats("activation", "output", name="cur_amax"))
    with bridge.inspecting(model, settings, quant="int8_wo") as session:
        out = model(x)
        session.step()
    seen = {(r.layer, r.tensor): r.value for r in session.inspection.records}
    hidden = torch.tanh(fp8(E5M2)(linear(fp8(E5M2)(x), model[0].weight, model[0].bias).detach()))
    assert seen["0", "activation"] == float(x.abs().max())
    assert seen["2", "activation"] == float(hidden.abs().max())  # with the error of the layer before
    assert seen["2", "output"] == float(out.abs().max())


class Row(torch.nn.Linear):
    """As Megatron's: a forward of its own, and (output, bias)."""

    def forward(self, input_: Any) -> Any:
        return linear(input_, self.weight), self.bias


def test_layers_that_cannot_be_changed_are_told_at_load() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"row": Row(8, 8), "conv": torch.nn.Conv1d(8, 8, 1), "own": torch.nn.Linear(8, 8)})
    model["own"].forward = lambda x: x
    with pytest.raises(InspectError) as caught, bridge.inspecting(model, config(HALF)):
        pass
    row = "FakeQuant cannot change Row, which computes in its own way: row"
    assert f"{row}; name other layers, or take DisableQuantization or statistics there" in str(caught.value)
    assert "a convolution: conv" in str(caught.value) and "a forward of its own: own" in str(caught.value)
    with bridge.inspecting(model, config(disable() | stats("weight")), quant="mxfp8") as session:
        session.step()
    assert "runs unquantized: a convolution: 1 layer (conv)" in session.notes


def test_a_layer_that_did_not_run_is_noted() -> None:
    model = twice()
    with bridge.inspecting(model, config(HALF)) as session:
        model[0](torch.randn(2, 64))
        session.step()
    (note,) = session.schemes.note_lines()
    assert note.startswith("was to be changed and was not: its module was not called") and note.endswith("1 layer (2)")


def test_a_matrix_that_is_split_over_ranks_is_not_changed() -> None:
    model = twice()
    model[0].weight.device_mesh = SimpleNamespace(mesh_dim_names=("tp",))
    with (
        pytest.raises(InspectError, match="a matrix that is split over ranks: 0"),
        bridge.inspecting(model, config(HALF)),
    ):
        pass
    model[0].weight.device_mesh = SimpleNamespace(mesh_dim_names=("dp",))  # whole, or not, when it runs
    with bridge.inspecting(model, config(HALF)), pytest.raises(InspectError, match="Linear: a matrix that is split"):
        model(torch.randn(2, 64))
    del model[0].weight.device_mesh
