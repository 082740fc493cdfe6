"""Backward: each module whose output has a gradient comes once and leaves once."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from bridge.tracker import ModTracker  # noqa: E402
from tests.tracker.recorded import Recorder, Two, rows  # noqa: E402

THREE = ["Two", "Two.a", "Two.b"]


def backward_of(recorder: Recorder) -> tuple[list[Any], list[Any]]:
    return sorted(map(str, recorder.names("pre_bw"))), sorted(map(str, recorder.names("post_bw")))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(3, 3), Double()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(given=given))  # type: ignore[no-any-return]


class Double(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * 2


def test_inputs_by_keyword_leave_at_their_place() -> None:
    recorder, model = Recorder(), Keywords()
    with recorder.tracker:
        model(given=rows() * 1).sum().backward()
    order = [(kind, name) for kind, name, *_ in recorder.seen if kind.endswith("bw")]
    assert order.index(("post_bw", "Keywords.last")) < order.index(("post_bw", "Keywords.first"))
    assert [kind for kind, _ in order].count("post_bw") == 3
    assert all(
        len(given) == 1 and given[0][0].shape == (2, 3) for kind, given in recorder.arguments if kind == "post_bw"
    )


@dataclass
class Output:
    states: torch.Tensor
    nothing: None = None


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, given: torch.Tensor) -> Output:
        return Output(self.inner(given))


def test_an_output_may_be_a_dataclass() -> None:
    recorder, model = Recorder(), Wrapped()
    with recorder.tracker:
        model(rows()).states.sum().backward()
    assert backward_of(recorder) == (["Wrapped", "Wrapped.inner"],) * 2


def test_inference_before_a_step_adds_nothing_to_its_backward() -> None:
    recorder, model = Recorder(), Two()
    with recorder.tracker:
        with torch.no_grad():
            model(rows(gradient=False))
        model(rows(gradient=False)).sum().backward()
    assert backward_of(recorder) == (THREE, THREE)


def test_a_graph_that_is_dropped_adds_nothing_to_another() -> None:
    recorder, model = Recorder(), Two()
    with recorder.tracker:
        for _ in range(2):
            model(rows(gradient=False))
        model(rows(gradient=False)).sum().backward()
    assert backward_of(recorder) == (THREE, THREE)


@pytest.mark.parametrize("gradient", [False, True])
def test_a_second_backward_has_all_modules_again(gradient: bool) -> None:
    recorder, model = Recorder(), Two()
    with recorder.tracker:
        loss = model(rows(gradient=gradient)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert backward_of(recorder) == (sorted(THREE * 2), sorted(THREE * 2))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_checkpoint_of_either_kind_has_each_module_once(reentrant: bool, whole: bool) -> None:
    recorder = Recorder()
    kind = partial(checkpoint, use_reentrant=reentrant)
    model = Two(None if whole else kind)
    with recorder.tracker as tracker:
        (kind(model, rows()) if whole else model(rows())).sum().backward()
        assert tracker.parents == {"Global"}
    assert backward_of(recorder) == (THREE, THREE)
    assert all(inside for *_, inside, _ in recorder.seen)


def test_nothing_is_left_on_a_graph_after_the_context() -> None:
    recorder = Recorder()
    with recorder.tracker:
        loss = Two()(rows()).sum()
    loss.backward()
    assert recorder.count("pre_bw") == recorder.count("post_bw") == 0
    with recorder.tracker:
        given = rows()
        states = nn.Linear(3, 3)(given)
    assert not given._backward_hooks
    assert not states._backward_hooks


def test_a_module_that_returns_its_input_comes_before_it_leaves() -> None:
    recorder, model = Recorder(), nn.Sequential(nn.Linear(3, 3), nn.Identity())
    with recorder.tracker:
        model(rows()).sum().backward()
    order = [(kind, name) for kind, name, *_ in recorder.seen if kind.endswith("bw")]
    assert order[:3] == [("pre_bw", "Sequential.0"), ("pre_bw", "Sequential.1"), ("post_bw", "Sequential.1")]
    assert Counter(name for _, name in order) == {"Sequential": 2, "Sequential.0": 2, "Sequential.1": 2}


def test_a_module_whose_output_is_not_used_has_no_backward() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            self.one(given)
            return self.two(given)  # type: ignore[no-any-return]

    recorder, model = Recorder(), Unused()
    with recorder.tracker:
        model(rows() * 1).sum().backward()
    assert backward_of(recorder) == (["Unused", "Unused.two"],) * 2


def test_gradients_of_some_inputs_only() -> None:
    """`torch.autograd.grad` of the weights: no gradient of the input arrives, and all leave when it ends."""
    recorder, model = Recorder(), Two()
    with recorder.tracker as tracker:
        torch.autograd.grad(model(rows()).sum(), [*model.parameters()])
        assert tracker.parents == {"Global"}
    assert backward_of(recorder) == (THREE, THREE)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


def test_a_backward_that_fails_leaves_no_module_behind() -> None:
    recorder, model = Recorder(), Two()
    with recorder.tracker as tracker:
        with pytest.raises(ValueError, match="no gradient"):
            model(Failing.apply(rows())).sum().backward()
        assert tracker.parents == {"Global"}
        model(rows()).sum().backward()
        assert tracker.parents == {"Global"}


def test_a_backward_inside_of_a_forward_does_not_end_it() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = Two()

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            self.two(given).sum().backward()
            seen.append(tracker.parents)
            return given

    seen: list[set[str]] = []
    with ModTracker() as tracker:
        Inner()(rows())
    assert seen == [{"Global", "Inner"}]


@pytest.mark.slow
def test_a_graph_is_freed_without_the_collector() -> None:
    """`register_multi_grad_hook` of torch makes a cycle through each graph."""
    model = nn.Bilinear(3, 3, 2)
    gc.collect()
    gc.disable()
    try:
        with ModTracker():
            one, two = rows() * 1, rows() * 2
            gone = weakref.ref(one)
            out = model(one, two)
            del one, two, out
            assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [None, False, True])
def test_outputs_and_gradients_have_the_same_bits(kind: bool | None) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(Two(None if kind is None else partial(checkpoint, use_reentrant=kind)), nn.Dropout(0.3))
        given = rows()
        out = model(given)
        out.square().sum().backward()
        return [out.detach(), given.grad, *(parameter.grad for parameter in model.parameters())]

    plain = run()
    recorder = Recorder()
    with recorder.tracker:
        tracked = run()
    assert recorder.count("pre_bw") == 5
    assert all(torch.equal(one, other) for one, other in zip(plain, tracked, strict=True))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_no_hook_on_a_callers_tensor(kind: type[BaseException]) -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise kind

    x = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(kind), ModTracker():
        nn.Sequential(Failing())(x)
    assert not x._backward_hooks


def test_a_hook_of_the_users_that_raises_leaves_none_either() -> None:
    def fail(*_: Any) -> None:
        raise ValueError

    x, tracker = torch.ones(2, 2, requires_grad=True), ModTracker()
    tracker.register_user_hooks(post_fw_hook=fail)
    with pytest.raises(ValueError), tracker:
        nn.Linear(2, 2)(x)
    assert not x._backward_hooks
