"""Hooks and changed GEMMs of one module: what they hand on, and that nothing else moves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from bridge.sources.opening import open_source  # noqa: E402
from bridge.workflows.inspect.changes.gemms import ChangedGemms, why_fixed  # noqa: E402
from bridge.workflows.inspect.hooks.watch import BACKWARD, FORWARD, Watch  # noqa: E402
from bridge.workflows.inspect.routes import TAKES  # noqa: E402

ALL = frozenset((*FORWARD, *BACKWARD))
MODELS = ["examples/models/tiny-llama", "examples/models/tiny-gpt2"]


def run(model: Any) -> tuple[Any, dict[str, Any]]:
    """Logits and gradients of a training step."""
    model.zero_grad()
    ids = torch.arange(48).reshape(2, 24) + 7
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


def matrices(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if not why_fixed(module)}


def equal(one: tuple[Any, dict[str, Any]], other: tuple[Any, dict[str, Any]]) -> bool:
    return torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("path", MODELS)
def test_bits_are_those_of_a_model_without_hooks(path: str) -> None:
    model = open_source(path).load_model().eval()
    plain = run(model)
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    seen: dict[str, set[str]] = {}
    shapes: dict[str, dict[str, Any]] = {}

    def see(name: str, what: str, value: Any, _: Any) -> None:
        seen.setdefault(name, set()).add(what)
        shapes.setdefault(name, {})[what] = value.shape

    watches = [Watch(module, ALL, partial(see, name)) for name, module in matrices(model).items()]
    assert equal(run(model), plain)
    assert set(seen) == set(matrices(model)) and all(found == ALL for found in seen.values())
    for found in shapes.values():
        assert found["weight"] == found["wgrad"] == (found["output"][-1], found["activation"][-1])
    for watch in watches:
        watch.detach()
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    assert not any(vars(module)[name] for module in model.modules() for name in hooks)
    assert not any(param._backward_hooks for param in model.parameters())
    seen.clear()
    assert equal(run(model), plain) and not seen


def small() -> Any:
    torch.manual_seed(3)
    return torch.nn.Linear(6, 5), torch.nn.Linear(6, 4), torch.randn(3, 6, requires_grad=True)


def test_what_is_seen_are_the_operands_and_results_of_the_three_products() -> None:
    """The input is read by two modules, and the gradient that one makes of it is its own."""
    one, other, x = small()
    seen: dict[str, Any] = {}
    watch = Watch(one, ALL, lambda name, value, _: seen.__setitem__(name, value))
    out = one(x)
    (out.square().sum() + other(x).square().sum()).backward()
    watch.detach()
    gradient = 2 * out.detach()
    expected = {
        "activation": x, "weight": one.weight, "output": out, "gradient": gradient, "dgrad": gradient @ one.weight,
        "wgrad": gradient.T @ x,
    }  # fmt: skip
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(seen[name], value.detach()), name
        assert not seen[name].requires_grad
    assert not torch.allclose(x.grad, seen["dgrad"])  # it holds the other module's part, too


def test_a_weight_that_is_used_twice_is_seen_once_and_its_gradients_added() -> None:
    one, _, x = small()
    seen: list[tuple[str, Any]] = []
    watch = Watch(one, frozenset({"weight", "wgrad"}), lambda *told: seen.append(told[:2]))
    (one(x).sum() + one(2 * x).sum()).backward()
    watch.detach()
    assert [name for name, _ in seen] == ["weight", "wgrad"]
    assert torch.equal(seen[1][1], one.weight.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeated_forward_is_not_seen_again(reentrant: bool) -> None:
    one, _, x = small()
    plain: list[str] = []
    seen: list[str] = []
    watch = Watch(one, ALL, lambda name, *_: plain.append(name))
    one(x).sum().backward()
    watch.detach()
    watch = Watch(one, ALL, lambda name, *_: seen.append(name))
    checkpoint(one, x, use_reentrant=reentrant).sum().backward()
    watch.detach()
    assert sorted(seen) == sorted(plain) == sorted(ALL)


def test_inputs_by_keyword_and_outputs_with_a_bias_are_seen() -> None:
    class Row(torch.nn.Linear):
        def forward(self, input_: Any) -> Any:
            return super().forward(input_), None

    module, x = Row(6, 5), torch.randn(3, 6, requires_grad=True)
    seen: set[str] = set()
    watch = Watch(module, ALL, lambda name, *_: seen.add(name))
    module(input_=x)[0].sum().backward()
    watch.detach()
    assert seen == ALL


@pytest.mark.parametrize("path", MODELS)
def test_gemms_that_nothing_changes_have_the_modules_own_bits(path: str) -> None:
    model = open_source(path).load_model().eval()
    plain, asked = run(model), set[tuple[str, str]]()

    def same(gemm: str, name: str, tensor: Any) -> Any:
        asked.add((gemm, name))
        return tensor

    gemms = [ChangedGemms(module, same) for module in matrices(model).values()]
    assert equal(run(model), plain)
    assert asked == {(gemm, name) for gemm, names in TAKES.items() for name in names}
    for gemm in gemms:
        gemm.detach()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("gemm", "name"), [(gemm, name) for gemm, names in TAKES.items() for name in names])
def test_one_changed_operand_changes_its_product_alone(gemm: str, name: str) -> None:
    one, _, x = small()

    def halved(where: str, what: str, tensor: Any) -> Any:
        return tensor / 2 if (where, what) == (gemm, name) else tensor

    seen: dict[str, Any] = {}
    gemms = ChangedGemms(one, halved)
    watch = Watch(one, ALL, lambda what, value, _: seen.__setitem__(what, value))
    one(x).backward(torch.ones(3, 5))
    watch.detach()
    gemms.detach()
    ones = torch.ones(3, 5)
    half = {key: 0.5 if key == (gemm, name) else 1.0 for key in ((g, n) for g, names in TAKES.items() for n in names)}
    product = (half["fprop", "activation"] * x) @ (half["fprop", "weight"] * one.weight).T + one.bias
    factors = {g: half[g, names[0]] * half[g, names[1]] * half[g, names[2]] for g, names in TAKES.items()}
    assert torch.allclose(seen["output"], half["fprop", "output"] * product)
    assert torch.allclose(seen["dgrad"], factors["dgrad"] * (ones @ one.weight))
    assert torch.allclose(seen["wgrad"], factors["wgrad"] * (ones.T @ x))
    assert torch.equal(one.bias.grad, ones.sum(0))
    assert torch.equal(seen["activation"], x.detach()) and torch.equal(seen["gradient"], ones)
