"""Join what ModelOpt collected in several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bridge.calibration.reference_outputs import Answers
from bridge.calibration.statistics import Statistics
from bridge.calibration.walk.workers.processes import Workers
from bridge.core.errors import CalibrationError

STEPS = ("num_cache_steps", "num_search_steps", "num_tokens")  # of AWQ's helper
SAMPLE = 1024  # values of each tensor that are compared between processes


@contextmanager
def joined_statistics(root: Any, workers: Workers | None) -> Iterator[None]:
    """Run a pass over the data, of which this process has a part, and then know what all saw.

    Maxima are exact in any order. ModelOpt's AWQ adds floats, so what it would add is kept, call by call, and added in
    the order of the batches.
    """
    if workers is None:
        yield
        return
    sums = {name: _Sums(m.awq_lite) for name, m in root.named_modules() if _searches(m)}
    yield
    quantizers = {name: module for name, module in root.named_modules() if _measures(name, module)}
    mine: dict[str, torch.Tensor] = {}
    for name, quantizer in quantizers.items():
        values = {"calib": quantizer._calibrator._calib_amax, "amax": getattr(quantizer, "_amax", None)}
        mine |= {f"{kind}/{name}": value for kind, value in values.items() if value is not None}
    for name, one in sums.items():
        mine |= {f"{kind}/{name}": value for kind, value in one.seen().items()}
    largest: dict[str, torch.Tensor] = {}
    for theirs in workers.exchange(mine):
        for key, value in theirs.items():
            kind, _, name = key.partition("/")
            if kind in ("calib", "amax"):
                largest[key] = torch.maximum(largest[key], value) if key in largest else value
            else:
                sums[name].add(kind, value)
    for one in sums.values():
        one.settle()
    for key, value in largest.items():
        kind, _, name = key.partition("/")
        _set_amax(root, quantizers[name], kind, value)


def joined_counts(seen: Statistics, workers: Workers | None, counted: bool) -> Statistics:
    """Return statistics of a block with the tokens of all processes; `counted`: it has experts."""
    if workers is None or not counted:
        return seen
    counts: dict[str, np.ndarray] = {}
    for theirs in workers.exchange({name: torch.from_numpy(array) for name, array in seen["expert_tokens"].items()}):
        for name, tokens in theirs.items():
            counts[name] = counts[name] + tokens.numpy() if name in counts else tokens.numpy()
    return {**seen, "expert_tokens": counts}


def join_answers(answers: Answers, workers: Workers | None) -> None:
    """Give every process the answers to all held-out inputs."""
    if workers is None:
        return
    mine = {"values": torch.from_numpy(answers.values)} if answers.values.size else {}
    if mine and answers.sampled:
        rows, columns = answers.sampled
        mine |= {"rows": torch.from_numpy(rows), "columns": torch.from_numpy(columns)}
    for losses in workers.agree([*answers.losses.items()]):
        answers.losses.update({at: (loss, count) for at, (loss, count) in losses})
    for theirs in workers.exchange(mine):
        if theirs:
            answers.values = theirs["values"].numpy()
            answers.sampled = theirs["rows"].numpy(), theirs["columns"].numpy()


def check_same_weights(block: str, modules: Iterable[tuple[str, Any]], workers: Workers | None) -> None:
    """CalibrationError if the first values of a block's tensors are not those of the other processes."""
    if workers is None:
        return
    import hashlib

    digest = hashlib.sha256()
    for _, module in modules:
        for tensor in module._parameters.values():
            if tensor is not None:
                values = tensor.detach().reshape(-1)[:SAMPLE].cpu().contiguous()
                digest.update(values.view(torch.uint8).numpy().tobytes())
    digests = workers.agree(digest.hexdigest())
    if other := [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]:
        raise CalibrationError(
            f"{block}: worker {other[0]} has other weights than worker 0; give all of them the same checkpoint"
        )


class _Sums:
    """The sums of one module's AWQ search. While the pass runs, terms stand in their place."""

    def __init__(self, helper: Any) -> None:
        self._helper, self._scale, self._losses = helper, helper.act_scale, dict(helper.loss)
        self._before = {name: getattr(helper, name) for name in STEPS}
        self._steps = dict.fromkeys(STEPS, 0.0)
        device = next(iter(self._losses.values())).device
        self._device = device
        self._loss = torch.stack([value.cpu() for value in self._losses.values()])
        if helper.cache_mode:
            helper.act_scale = _Terms(device)
        helper.loss = {alpha: _Terms(device) for alpha in self._losses}

    def seen(self) -> dict[str, torch.Tensor]:
        """What this process would have added: a row for each call of the module."""
        helper = self._helper
        steps = [float(getattr(helper, name) - self._before[name]) for name in STEPS]
        seen = {"steps": torch.tensor(steps, dtype=torch.float64)}
        if isinstance(helper.act_scale, _Terms) and helper.act_scale.terms:
            seen["scale"] = torch.stack(helper.act_scale.terms).cpu()
        if any(terms.terms for terms in helper.loss.values()):
            seen["loss"] = torch.stack([torch.stack(terms.terms) for terms in helper.loss.values()], 1).cpu()
        return seen

    def add(self, kind: str, value: torch.Tensor) -> None:
        """Add what a process saw."""
        if kind == "steps":
            self._steps = {name: self._steps[name] + float(step) for name, step in zip(STEPS, value, strict=True)}
            return
        for term in value:
            if kind == "scale":
                self._scale = self._scale + term.to(self._device)
            else:
                self._loss = self._loss + term

    def settle(self) -> None:
        """Put the sums into ModelOpt's helper."""
        helper = self._helper
        helper.act_scale = self._scale
        helper.loss = dict(zip(self._losses, self._loss.to(self._device), strict=True))
        for name, step in self._steps.items():
            setattr(helper, name, self._before[name] + type(self._before[name])(step))


class _Terms:
    """Takes the place of a sum and keeps what is added to it."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.terms: list[torch.Tensor] = []

    def __iadd__(self, term: torch.Tensor) -> _Terms:
        self.terms.append(term)
        return self


def _searches(module: Any) -> bool:
    """Whether AWQ is at work in a module; its helper stays afterwards."""
    helper = getattr(module, "awq_lite", None)
    return helper is not None and helper.best_alpha is None


def _measures(name: str, module: Any) -> bool:
    """Whether a module is a quantizer that sees activations; those of weights see the same in every process."""
    calibrator = getattr(module, "_calibrator", None)
    if calibrator is None or "weight_quantizer" in name:
        return False
    if not hasattr(calibrator, "_calib_amax"):
        raise CalibrationError(f"{name}: a {type(calibrator).__name__} cannot be joined from several workers; use one")
    return True


def _set_amax(root: Any, quantizer: Any, kind: str, value: torch.Tensor) -> None:
    """Put a joined maximum into a quantizer, which may have seen nothing here."""
    mine = quantizer._calibrator._calib_amax if kind == "calib" else getattr(quantizer, "_amax", None)
    if mine is None:
        device = next((tensor.device for tensor in root.parameters()), value.device)
        value = value.to(device)
        if kind == "calib":
            quantizer._calibrator._calib_amax = value
        else:
            quantizer.amax = value
    else:
        mine.copy_(value)
