"""Forward: exceptions, threads, entering and leaving, several kinds of hooks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.modules import module as hooks_of_torch  # noqa: E402

from bridge.tracker import ModTracker  # noqa: E402
from tests.tracker.recorded import Recorder, Two, rows  # noqa: E402


def global_hooks() -> list[int]:
    """How many hooks and notes of hooks torch holds for all modules."""
    tables = [value for name, value in vars(hooks_of_torch).items() if name.startswith("_global_")]
    return [len(table) for table in tables if isinstance(table, dict)]


class Broken(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        raise self.error("broken")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_forward_leaves_no_module_behind(error: type[BaseException]) -> None:
    """torch calls no hook for an exception like Ctrl-C: the next module that ends is out of it."""
    broken = nn.Sequential(nn.Sequential(Broken(error)))

    class Catching(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            with pytest.raises(error):
                broken(given)
            return given

    before = global_hooks()
    with ModTracker() as tracker:
        Catching()(rows())
        assert (tracker.parents, tracker.chain) == ({"Global"}, ())
        with pytest.raises(error):
            broken(rows())
        if error is ValueError:
            assert (tracker.parents, tracker.chain) == ({"Global"}, ())
    assert (tracker.parents, tracker.chain) == ({"Global"}, ())
    assert global_hooks() == before


def test_the_hook_after_a_forward_that_raised_has_no_output() -> None:
    recorder = Recorder()
    with recorder.tracker, pytest.raises(ValueError, match="broken"):
        nn.Sequential(Broken(ValueError))(rows())
    assert [kind for kind, *_ in recorder.seen] == ["pre_fw", "pre_fw", "post_fw", "post_fw"]
    assert recorder.arguments[2:] == [("post_fw", None)] * 2


@pytest.mark.filterwarnings("ignore:global module forward hook")
@pytest.mark.parametrize("kind", ["pre_fw", "post_fw", "pre_bw", "post_bw"])
def test_an_exception_in_a_hook_leaves_no_module_behind(kind: str) -> None:
    def refuse(module: nn.Module, *_: Any) -> None:
        if isinstance(module, nn.Linear):
            raise ValueError("refused")

    tracker, model = ModTracker(), Two()
    tracker.register_user_hooks(**{f"{kind}_hook": refuse})
    with tracker:
        with pytest.raises(ValueError, match="refused"):
            model(rows()).sum().backward()
        assert (tracker.parents, tracker.chain) == ({"Global"}, ())
        tracker.clear_user_hooks()
        model(rows()).sum().backward()
        assert tracker.parents == {"Global"}


def test_a_thread_has_its_own_chain_and_shares_the_parents() -> None:
    seen: dict[str, tuple[str, tuple[str, ...], set[str]]] = {}
    met = threading.Barrier(2, timeout=20)

    class Here(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            met.wait()
            seen[threading.current_thread().name] = tracker.current, tracker.chain, tracker.parents
            met.wait()
            return given

    with ModTracker() as tracker:
        models = {name: nn.ModuleDict({name: nn.Sequential(Here())})[name] for name in ("one", "two")}
        names = {}
        threads = [threading.Thread(target=model, args=(rows(),), name=name) for name, model in models.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        names = {name: tracker.get_known_fqn(model) for name, model in models.items()}
    assert {*names.values()} == {"Sequential", "Sequential#2"}
    for name, own in names.items():
        assert seen[name][:2] == (f"{own}.0", (own, f"{own}.0"))
        assert seen[name][2] == {"Global", *(f"{each}{end}" for each in names.values() for end in ("", ".0"))}


def test_entered_twice_is_left_twice() -> None:
    before, recorder = global_hooks(), Recorder()
    with recorder.tracker:
        with recorder.tracker:
            Two()(rows())
        assert global_hooks() != before
        Two()(rows())
    assert global_hooks() == before
    assert recorder.count("pre_fw") == 6


def test_hooks_that_are_registered_in_two_calls_are_both_kept() -> None:
    seen: list[str] = []
    tracker = ModTracker()
    tracker.register_user_hooks(pre_fw_hook=lambda *_: seen.append("pre"))
    tracker.register_user_hooks(post_fw_hook=lambda *_: seen.append("post"))
    with tracker:
        nn.Identity()(rows())
    assert seen == ["pre", "post"]


def test_a_module_that_runs_already_is_not_ended() -> None:
    """The tracker is entered inside of a forward: torch calls the hook after it without one before it."""
    recorder = Recorder()

    class Entering(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            recorder.tracker.__enter__()
            return given

    handle = hooks_of_torch.register_module_forward_hook(lambda *_: None)
    try:
        Entering()(rows())
    finally:
        handle.remove()
        recorder.tracker.__exit__(None, None, None)
    assert recorder.seen == []
