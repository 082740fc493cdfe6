"""The first NaN or infinity: its module, direction and parameter; nothing in a sound model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from bridge.tracker import NanFinder, NotFinite  # noqa: E402
from bridge.tracker.finite import FINITE, INFINITE, NAN, worst  # noqa: E402
from tests.tracker.recorded import Two, rows  # noqa: E402

LLAMA = Path(__file__).parent.parent.parent / "examples" / "models" / "tiny-llama"


class Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return self.function(*given, **named)  # type: ignore[no-any-return]


def found(model: nn.Module, given: torch.Tensor, *, backward: bool = False, loss: Any = torch.sum) -> NotFinite | None:
    with NanFinder(model) as finder:
        out = model(given)
        if backward:
            loss(out).backward()
    return finder.first


def test_an_infinite_weight_is_named() -> None:
    model = nn.Sequential(Two(), nn.Linear(5, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight[1, 2] = float("inf")
    first = found(model, rows())
    assert first == NotFinite("1", "forward", "infinity", "weight")
    assert str(first) == "1 makes infinity in forward: weight is not finite"


def test_a_buffer_that_is_nan_is_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3).eval())
    model[0].running_mean[0] = float("nan")
    assert found(model, rows()) == NotFinite("0", "forward", "NaN", "running_mean")


@pytest.mark.parametrize("in_place", [False, True])
def test_the_log_of_a_negative_number(in_place: bool) -> None:
    """Where the module changes its input, the input is looked at before."""
    model = nn.Sequential(nn.Identity(), Apply(torch.Tensor.log_ if in_place else torch.log), nn.Identity())
    assert found(model, rows(gradient=False)) == NotFinite("1", "forward", "NaN")


def test_an_overflow_in_float16() -> None:
    model = nn.Sequential(nn.Identity(), Apply(lambda values: values * 60000), Apply(lambda values: values - values))
    assert found(model, torch.tensor([[2.0]], dtype=torch.float16)) == NotFinite("1", "forward", "infinity")


def test_the_code_between_modules_is_that_of_the_module_around() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Identity(), nn.Softmax(-1)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(given).clamp_max(0).log())  # type: ignore[no-any-return]

    assert found(nn.Sequential(Between()), rows()) == NotFinite("0", "forward", "NaN")
    assert found(Between(), rows()) == NotFinite("Between", "forward", "NaN")


def test_inputs_by_keyword_are_looked_at() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Apply(lambda given: given * 1)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return self.inner(given=given.log())  # type: ignore[no-any-return]

    assert found(Named(), rows()) == NotFinite("Named", "forward", "NaN")


def test_a_mask_may_hold_minus_infinity() -> None:
    mask = torch.tensor([[0.0, -torch.inf, 0.0]])

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Apply(lambda states, mask: ((states + mask).softmax(-1), mask))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.attention(states, mask=mask)[0]  # type: ignore[no-any-return]

    assert found(Masked(), rows()) is None
    nothing = torch.full_like(mask, -torch.inf)
    model = Masked()
    model.attention.function = lambda states, mask: (states + nothing).softmax(-1)[None]
    assert found(model, rows()) == NotFinite("attention", "forward", "NaN")


def test_inputs_that_are_not_finite_are_nobodys() -> None:
    given = torch.full((2, 3), torch.nan)
    first = found(Two(), given)
    assert first == NotFinite("", "forward", "NaN")
    assert str(first) == "the inputs of the model hold NaN"


class Pinched(torch.autograd.Function):
    """Finite in forward; its gradient is not."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.inf


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_a_gradient_that_a_module_makes(checkpointed: bool | None) -> None:
    """The inner of two modules that end with the same gradient; modules before them pass it on."""
    inner: nn.Module = nn.Sequential(nn.Sequential(Apply(Pinched.apply), nn.Linear(4, 4)))
    if checkpointed is not None:
        kept = inner
        inner = Apply(partial(checkpoint, kept, use_reentrant=checkpointed))
        inner.kept = kept
    model = nn.Sequential(nn.Linear(3, 4), inner, nn.Linear(4, 1))
    first = found(model, rows(), backward=True)
    assert first == NotFinite("1.0.0" if checkpointed is None else "1.kept.0.0", "backward", "infinity")
    assert str(first).endswith("makes infinity in backward")


def test_the_gradient_of_a_second_input() -> None:
    """It is -infinity, which masks among the inputs of a forward may hold."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add = Apply(lambda one, two: one + Pinched.apply(two))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return self.add(given * 1, given * 2)  # type: ignore[no-any-return]

    first = found(Both(), rows(), backward=True, loss=lambda out: -out.sum())
    assert first == NotFinite("add", "backward", "infinity")


def test_the_gradient_of_a_parameter() -> None:
    """It overflows in float16, while that of the input does not; the first layer's input needs none."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).half()
    with torch.no_grad():
        model[0].weight.fill_(200)
        model[1].weight.fill_(0.01)
    first = found(
        model, torch.full((2, 1), 200.0, dtype=torch.float16), backward=True, loss=lambda out: out.sum() * 400
    )
    assert first == NotFinite("1", "backward", "infinity", "weight")
    assert str(first) == "1 makes infinity in backward: weight gets it as gradient"


class Scaled(nn.Module):
    """Scales by a norm, whose derivative at 0 is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        values = self.a(given)
        return self.b(values * values.pow(2).sum(-1, keepdim=True).sqrt())  # type: ignore[no-any-return]


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_a_gradient_that_the_code_between_modules_makes(outer: bool, needs_gradient: bool) -> None:
    """Also where the input of the module needs no gradient, so that none leaves it."""
    model = nn.Sequential(Scaled(), nn.Linear(2, 1)) if outer else Scaled()
    first = found(model, torch.zeros(2, 3, requires_grad=needs_gradient), backward=True)
    assert first == NotFinite("0" if outer else "Scaled", "backward", "NaN")
    loss = model(torch.zeros(2, 3)).sum()
    with pytest.raises(RuntimeError, match="nan values"), torch.autograd.detect_anomaly():
        loss.backward()


def test_a_loss_that_is_nan_is_nobodys() -> None:
    first = found(Two(), rows(), backward=True, loss=lambda out: (out * 0).sum().sqrt())
    assert first == NotFinite("", "backward", "NaN")
    assert str(first) == "the gradient of the loss holds NaN"


DTYPES = ["float64", "float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_value_is_seen_wherever_it_is(dtype: str) -> None:
    bads = [(torch.nan, NAN), (torch.inf, INFINITE), (-torch.inf, INFINITE)]
    for count in (1, 3, 17, 64, 1000):
        values = torch.linspace(-2, 2, count)
        assert worst([values.to(getattr(torch, dtype))]) == FINITE
        for at in {0, count // 2, count - 1}:
            for bad, state in bads[:1] if dtype == "float8_e4m3fn" else bads:  # it has no infinity
                changed = values.index_fill(0, torch.tensor([at]), bad).to(getattr(torch, dtype))
                assert worst([changed]) == worst([changed.reshape(1, -1).t()]) == state, (count, at, bad)


def test_what_has_no_floats_in_memory_is_finite() -> None:
    others = [torch.empty(0), torch.ones(3, dtype=torch.int64), torch.empty(3, device="meta"), torch.eye(2).to_sparse()]
    assert worst([*others, None]) == FINITE


def test_nothing_is_found_in_a_sound_model_and_its_bits_are_kept() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(LLAMA)
    ids = torch.arange(40).reshape(2, 20)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(ids, labels=ids, attention_mask=torch.ones_like(ids).tril(-1).flip(-1) | (ids % 20 > 9))
        out.loss.backward()
        return [out.logits.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = run()
    with NanFinder(model) as finder:
        looked = run()
    assert finder.first is None
    assert all(torch.equal(one, other) for one, other in zip(plain, looked, strict=True))
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with NanFinder(model) as finder, torch.no_grad():
        model(ids)
    assert finder.first == NotFinite("model.layers.1.mlp.up_proj", "forward", "NaN", "weight")
