"""Names: the class of the root and the path of `named_modules`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from bridge.tracker import ModTracker  # noqa: E402
from tests.tracker.recorded import Recorder, Two, rows  # noqa: E402


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3))
        self.second = nn.ModuleList([self.first[0]])

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.second[0](self.first(given))  # type: ignore[no-any-return]


@pytest.mark.parametrize("given", [False, True])
def test_a_module_under_two_parents_has_the_path_of_named_modules(given: bool) -> None:
    model = Holder()
    with ModTracker(model if given else None) as tracker:
        model(rows())
    known = {tracker.get_known_fqn(module) for module in model.modules()}
    assert known == {f"Holder.{path}".rstrip(".") for path, _ in model.named_modules()}
    assert tracker.get_known_fqn(model.second[0]) == "Holder.first.0"


def test_a_child_that_is_called_first_has_its_full_path_with_a_root() -> None:
    model = Two()
    recorder = Recorder(model)
    with recorder.tracker:
        model.a(rows())
    assert recorder.names("pre_fw") == ["Two.a"]


def test_without_a_root_such_a_child_gets_its_path_when_the_parent_is_called() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
    with ModTracker() as tracker:
        model[0](rows())
        assert tracker.get_known_fqn(model[0][0]) == "Sequential.0"
        model(rows())
    assert [tracker.get_known_fqn(module) for module in model.modules()] == [
        "Sequential#2", "Sequential#2.0", "Sequential#2.0.0",
    ]  # fmt: skip


@pytest.mark.parametrize("given", [False, True])
def test_a_module_that_is_added_later_has_its_full_path(given: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    recorder = Recorder(model if given else None)
    with recorder.tracker:
        model(rows())
        model.append(nn.Sequential(nn.Linear(3, 4)))
        model(rows())
    assert recorder.names("pre_fw")[2:] == ["Sequential", "Sequential.0", "Sequential.1", "Sequential.1.0"]


def test_two_roots_of_a_class_are_told_apart() -> None:
    one, two = Two(), Two()
    recorder = Recorder()
    with recorder.tracker:
        two(one(rows()) @ torch.ones(5, 3))
    assert recorder.names("pre_fw") == ["Two", "Two.a", "Two.b", "Two#2", "Two#2.a", "Two#2.b"]


def test_the_name_of_a_root_that_is_gone_is_free() -> None:
    """Modules that a forward makes and drops are not counted for ever."""
    recorder = Recorder()
    with recorder.tracker:
        for _ in range(3):
            nn.Softmax(-1)(rows())
    assert recorder.names("pre_fw") == ["Softmax"] * 3


class Wrap(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.module(given)  # type: ignore[no-any-return]


def test_a_wrapper_does_not_rename_the_root_that_was_given() -> None:
    model = Two()
    recorder = Recorder(model)
    with recorder.tracker:
        Wrap(model)(rows())
    assert recorder.names("pre_fw") == ["Wrap", "Two", "Two.a", "Two.b"]


def test_without_a_root_the_wrapper_is_the_root() -> None:
    recorder = Recorder()
    with recorder.tracker:
        Wrap(Two())(rows())
    assert recorder.names("pre_fw") == ["Wrap", "Wrap.module", "Wrap.module.a", "Wrap.module.b"]


def test_what_is_not_known_has_no_name() -> None:
    tracker = ModTracker()
    assert tracker.get_known_fqn(Two()) is None
    assert tracker.get_known_fqn(None) is None


def test_current_and_chain_name_the_innermost_module() -> None:
    model, seen = Two(), []
    with ModTracker(model) as tracker:
        model.b.register_forward_hook(lambda *_: seen.append((tracker.current, tracker.chain)))
        model.b.weight.register_hook(lambda _: seen.append((tracker.current, tracker.chain)))
        assert (tracker.current, tracker.chain) == ("Global", ())
        model(rows()).sum().backward()
        assert (tracker.current, tracker.chain) == ("Global", ())
    assert seen[0] == ("Two", ("Two",))  # hooks of all modules are called before those of one
    assert seen[1][1] == ()
