"""`te.Linear` under Transformer Engine's own features, in a process, and the same layer under bridge's."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import bridge
from tests.oracles.te_runtime.cases import IN, LAYER, OUT, Answer, Case
from tests.oracles.te_runtime.start import HOME

MISSING = "Transformer Engine's Python is not installed here; install it with: make oracles"
ROOT = Path(__file__).parents[2]


def is_installed() -> bool:
    return HOME.is_dir()


def answers(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What Transformer Engine gives for each case, or for the arguments of `process.fake_quantized`."""
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder, "job"), Path(folder, "out")
        job.write_bytes(pickle.dumps(dict(asked)))
        command = [sys.executable, "-m", "tests.oracles.te_runtime.process", str(job), str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = pickle.loads(out.read_bytes())
        return found


class Model(torch.nn.Module):
    """A model with one linear layer, of the name that cases have."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.dtype = getattr(torch, case.dtype)
        layer = torch.nn.Linear(IN, OUT, case.bias, dtype=self.dtype)
        weight, bias = case.parameters()
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight))
            if case.bias:
                layer.bias.copy_(torch.from_numpy(bias))
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"fc": layer})])})

    def forward(self, x: Any) -> Any:
        return self.get_submodule(LAYER)(x)


def inspected(case: Case, **given: Any) -> Answer:
    """The same case under `bridge.inspecting`, with the same config."""
    answer, model = Answer(), Model(case)
    with bridge.inspecting(model, case.config, **given) as session:
        run(case, model, answer, session.step)
    answer.logged = {
        (record.step, f"{record.tensor}_{record.stat}"): record.value for record in session.inspection.records
    }
    return answer


def run(case: Case, model: Model, answer: Answer, step: Any = lambda: None) -> Answer:
    """Run a case's steps, forward and backward."""
    for at in range(case.steps):
        for part in range(case.microbatches):
            x, gradient = (torch.from_numpy(made).to(model.dtype) for made in case.microbatch(at, part))
            x.requires_grad_()
            model.zero_grad()
            y = model(x)
            y.backward(gradient)
            answer.outputs.append(_array(y))
            answer.dgrads.append(_array(x.grad))
            answer.wgrads.append(_array(model.get_submodule(LAYER).weight.grad))
        step()
    return answer


def _array(tensor: Any) -> Any:
    return tensor.detach().float().numpy().copy()
