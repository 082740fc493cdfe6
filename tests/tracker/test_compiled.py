"""Compiled models: all hooks are called, and results are those of the model as it is written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.tracker.recorded import Recorder, Two, rows  # noqa: E402

pytestmark = pytest.mark.slow  # torch._dynamo takes 3 s to load


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_calls_all_hooks(in_place: bool, checkpointed: bool) -> None:
    model = Two(partial(checkpoint, use_reentrant=False) if checkpointed else None)
    compiled: Any = model
    if in_place:
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager")
    given = rows()
    plain = compiled(given).sum()
    plain.backward()
    expected, given.grad = given.grad, None
    recorder = Recorder(model)
    with recorder.tracker:
        tracked = compiled(given).sum()
        tracked.backward()
    own = [(kind, name) for kind, name, *_ in recorder.seen if name != "OptimizedModule"]
    recomputed = 2 if checkpointed else 0
    assert len(own) == 12 + recomputed
    assert {name for _, name in own} == {"Two", "Two.a", "Two.b"}
    assert torch.equal(plain, tracked)
    assert torch.equal(expected, given.grad)
    seen = len(recorder.seen)
    compiled(given)
    assert len(recorder.seen) == seen


def test_a_stance_of_the_caller_is_kept() -> None:
    from torch._dynamo import eval_frame

    recorder = Recorder()
    with torch.compiler.set_stance("fail_on_recompile"):
        with recorder.tracker:
            assert eval_frame._stance.stance == "force_eager"
        assert eval_frame._stance.stance == "fail_on_recompile"


def test_a_model_that_is_compiled_in_the_context_is_seen_and_nothing_is_loaded_before() -> None:
    code = """
import sys, torch
from bridge.tracker import ModTracker
seen = []
with ModTracker() as tracker:
    assert "torch._dynamo" not in sys.modules
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)), backend="eager")
    tracker.register_user_hooks(pre_fw_hook=lambda module, given: seen.append(tracker.current))
    model(torch.ones(1, 2))
assert seen == ["OptimizedModule", "OptimizedModule._orig_mod", "OptimizedModule._orig_mod.0"], seen
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
