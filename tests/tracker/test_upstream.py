"""The cases of torch's own tests of its two trackers (test_mod_tracker.py, test_module_tracker.py)."""

from __future__ import annotations

from copy import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from bridge.tracker import ModTracker  # noqa: E402
from tests.tracker.recorded import Recorder, Two, rows  # noqa: E402


def test_parents_are_the_chain_in_forward_and_the_module_in_backward() -> None:
    """Inputs are dicts, changed in place; modules stand in a list and a dict; two steps in one context."""
    forward: list[tuple[set[str], bool]] = []
    backward: list[tuple[set[str], bool]] = []

    class Square(nn.Module):
        def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            matrix = given["m"].relu_()
            forward.append((copy(tracker.parents), tracker.is_bw))
            matrix.register_hook(lambda _: backward.append((copy(tracker.parents), tracker.is_bw)))
            return {"m": matrix @ matrix}

    class Mod(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Square()
            self.b = nn.ModuleDict({"nest": Square()})
            self.c = nn.ModuleList([Square()])

        def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return self.b["nest"](self.a(self.c[0](given)))  # type: ignore[no-any-return]

    model = Mod()
    with ModTracker() as tracker:
        for _ in range(2):
            model({"m": torch.rand(4, 4, requires_grad=True).clone()})["m"].sum().backward()
    order = ["Mod.c.0", "Mod.a", "Mod.b.nest"]
    assert forward == [({"Global", "Mod", name}, False) for name in order] * 2
    assert backward == [({"Global", "Mod", name}, True) for name in reversed(order)] * 2


def test_backward_is_over_when_it_returns() -> None:
    model = nn.Linear(2, 2)
    with ModTracker() as tracker:
        model(torch.rand(2, requires_grad=True)).sum().backward()
        assert not tracker.is_bw
        assert tracker.parents == {"Global"}


class Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given).relu_()  # type: ignore[no-any-return]


def test_hooks_are_called_in_this_order_with_their_module() -> None:
    recorder, model = Recorder(), Relu()
    with recorder.tracker:
        model(rows()).sum().backward()
    forward = [("pre_fw", "Relu"), ("pre_fw", "Relu.inner"), ("post_fw", "Relu.inner"), ("post_fw", "Relu")]
    backward = [("pre_bw", "Relu"), ("pre_bw", "Relu.inner"), ("post_bw", "Relu"), ("post_bw", "Relu.inner")]
    assert recorder.seen == [(*one, True, False) for one in forward] + [(*one, True, True) for one in backward]
    (pre, outer), (post, inner) = recorder.arguments[4], recorder.arguments[7]
    assert (pre, len(outer), outer[0].shape) == ("pre_bw", 1, (2, 3))
    assert (post, len(inner), len(inner[0]), inner[0][0].shape) == ("post_bw", 1, 1, (2, 3))


def test_a_second_hook_of_a_kind_is_refused_and_changes_nothing() -> None:
    recorder = Recorder()
    with pytest.raises(AssertionError, match=r"^pre_fw_hook is registered already; call clear_user_hooks\(\) first$"):
        recorder.tracker.register_user_hooks(lambda module, given: None, None, None, None)
    with recorder.tracker:
        Relu()(rows())
    assert recorder.count("pre_fw") == 2
    recorder.tracker.clear_user_hooks()
    with recorder.tracker:
        Relu()(rows()).sum().backward()
    assert recorder.count("pre_fw") == 2


def test_a_module_that_was_freed_is_none_in_backward() -> None:
    recorder, model = Recorder(), Relu()
    with recorder.tracker:
        loss = model(rows()).sum()
        del model
        loss.backward()
    assert recorder.seen[4:] == [("pre_bw", None, False, True)] * 2 + [("post_bw", None, False, True)] * 2


def test_checkpointed_modules_run_again_in_backward_and_have_one_backward() -> None:
    recorder = Recorder()
    model = Two(partial(checkpoint, use_reentrant=False))
    with recorder.tracker:
        model(rows(gradient=False)).sum().backward()
    assert recorder.seen == [
        ("pre_fw", "Two", True, False),
        ("pre_fw", "Two.a", True, False),
        ("post_fw", "Two.a", True, False),
        ("pre_fw", "Two.b", True, False),
        ("post_fw", "Two.b", True, False),
        ("post_fw", "Two", True, False),
        ("pre_bw", "Two.b", True, True),
        ("pre_bw", "Two", True, True),
        ("pre_fw", "Two.b", True, True),
        ("post_fw", "Two.b", True, True),
        ("post_bw", "Two.b", True, True),
        ("pre_bw", "Two.a", True, True),
        ("post_bw", "Two.a", True, True),
        ("post_bw", "Two", True, True),
    ]


class Again(nn.Module):
    """Calls itself once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.within = False

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.within = not self.within
        return self(given) if self.within else self.inner(given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_module_may_call_itself(reentrant: bool | None, recwarn: pytest.WarningsRecorder) -> None:
    """Silently, where torch's own warns twice and replaces `warnings.formatwarning`."""
    recorder, model = Recorder(), Again()
    with recorder.tracker as tracker:
        if reentrant is None:
            model(rows()).sum().backward()
        else:
            checkpoint(model, rows(), use_reentrant=reentrant).sum().backward()
        assert tracker.parents == {"Global"}
    assert recorder.names("pre_bw") == ["Again.inner", "Again", "Again"]
    assert sorted(map(str, recorder.names("post_bw"))) == ["Again", "Again", "Again.inner"]
    assert not [one for one in recwarn if "hierarchy" in str(one.message)]
