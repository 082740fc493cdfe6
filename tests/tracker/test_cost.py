"""Time of each module, and bytes that it keeps for backward."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from bridge.tracker import CostMeter  # noqa: E402
from tests.tracker.recorded import Two, rows  # noqa: E402


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = nn.Linear(3, 3), seconds

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.inner(given)  # type: ignore[no-any-return]


def test_time_is_split_into_own_and_that_of_modules_inside() -> None:
    model = nn.Sequential(Slow(0.02), Slow(0.05))
    model[1].inner.weight.register_hook(lambda _: time.sleep(0.03))
    with CostMeter(model) as meter:
        for _ in range(2):
            model(rows()).sum().backward()
    costs = {cost.module: cost for cost in meter.costs}
    assert list(costs) == ["Sequential", "0", "0.inner", "1", "1.inner"]
    assert {cost.calls for cost in costs.values()} == {2}
    assert costs["Sequential"].forward >= costs["0"].forward + costs["1"].forward >= 0.14
    assert costs["1"].own >= 0.1 > costs["Sequential"].own >= 0
    total = sum(cost.own for cost in costs.values())
    assert total == pytest.approx(costs["Sequential"].forward, rel=1e-6)
    assert costs["1.inner"].backward >= 0.06
    assert costs["1.inner"].forward < 0.05


def test_bytes_that_are_kept_are_counted_once_and_without_parameters() -> None:
    """`a` keeps its input, 2 x 3; relu its output, 2 x 4, which `b` keeps too."""
    model = Two()
    with CostMeter(model) as meter:
        for _ in range(2):
            model(rows()).sum().backward()
    assert {cost.module: cost.kept for cost in meter.costs} == {"Two": 2 * 56, "a": 2 * 24, "b": 0}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_less_and_its_repeat_is_backward(reentrant: bool) -> None:
    def run(checkpointed: bool) -> dict[str, tuple[int, int]]:
        model = Slow(0.02) if not checkpointed else nn.Sequential(Slow(0.02))
        given = rows()
        with CostMeter(model) as meter:
            out = checkpoint(model, given, use_reentrant=reentrant) if checkpointed else model(given)
            out.square().sum().backward()
        return {cost.module.removeprefix("0."): (cost.calls, cost.kept) for cost in meter.costs}

    assert run(False)["inner"] == (1, 24)
    assert run(True)["inner"] == (1, 0)


@pytest.mark.slow
def test_results_have_the_same_bits_and_nothing_is_held() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(Two(partial(checkpoint, use_reentrant=False)), nn.Dropout(0.2))
        given = rows()
        out = model(given)
        out.square().sum().backward()
        weight = torch.ones(3, requires_grad=True)
        (first,) = torch.autograd.grad((weight.exp() * weight).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        return [out.detach(), given.grad, second, *(p.grad for p in model.parameters())]

    plain = run()
    model = Two()
    with CostMeter(model):
        measured = run()
        gc.collect()
        gc.disable()
        try:
            kept = torch.ones(2, 3) * 2
            gone = weakref.ref(kept)
            out = model(kept).exp()
            del kept, out
            assert gone() is None
        finally:
            gc.enable()
    assert all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True))


def test_a_module_that_calls_itself_is_timed_once() -> None:
    class Twice(nn.Module):
        inside = False

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            self.inside = not self.inside
            time.sleep(0.02)
            return self(given) if self.inside else given  # type: ignore[no-any-return]

    with CostMeter(model := Twice()) as meter:
        model(rows())
    (cost,) = meter.costs
    assert cost.calls == 2
    assert 0.04 <= cost.forward == pytest.approx(cost.own, rel=1e-6)


def test_a_tensor_without_one_storage_is_left_out() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 2))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(given.to_sparse(), self.weight)

    with CostMeter(model := Sparse()) as meter:
        model(rows(gradient=False)).sum().backward()
    assert meter.costs[0].calls == 1
