"""Compiled models: seen at steps that are due, compiled at all others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402

pytestmark = pytest.mark.slow  # torch._dynamo takes 3 s to load


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x).relu())


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_seen_when_due_and_runs_compiled_otherwise(in_place: bool) -> None:
    compiled: list[int] = []
    runs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(step)

        def run(*inputs: Any) -> Any:
            runs.append(step)
            return graph.forward(*inputs)

        return run

    model = Small()
    x = torch.randn(3, 4)
    plain = model(x)
    called: Any = model
    if in_place:
        model.compile(backend=backend)
    else:
        called = torch.compile(model, backend=backend)
    stats = {"LogTensorStats": {"enabled": True, "tensors": ["output", "wgrad"], "stats": ["rms"], "freq": 2}}
    config = {"s": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": stats}}
    with bridge.inspecting(called, config) as session:
        for step in range(4):  # noqa: B007  the backend reads it
            out = called(x)
            assert torch.equal(out, plain)
            out.sum().backward()
            session.step()
    step = 4
    called(x)
    assert runs == [1, 3, 4] and compiled == [1]
    assert [(r.step, r.layer, r.tensor) for r in session.inspection.records] == [
        (step, layer, tensor) for step in (0, 2) for layer in "ab" for tensor in ("output", "wgrad")
    ]
    assert session.schemes.note_lines() == []


def test_a_class_that_wants_nothing_leaves_a_model_compiled(tmp_path: Path) -> None:
    text = "class Never:\n    def inspect_tensor_enabled(self, config, layer, **_):\n        return False, None\n"
    text += "    def inspect_tensor(self, config, layer, **_): ...\n"
    (tmp_path / "never.py").write_text(text)
    runs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *inputs: runs.append(1) or graph.forward(*inputs)

    model: Any = torch.compile(Small(), backend=backend)
    words = {"Never": {"enabled": True, "tensors": ["output"]}}
    config = {"s": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": words}}
    with bridge.inspecting(model, config, feature_dirs=tmp_path) as session:
        for _ in range(2):
            model(torch.randn(3, 4))
            session.step()
    assert len(runs) == 2
