"""Run a model on data while a session looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bridge.calibration.data import Data
from bridge.calibration.modelopt import copy_modules
from bridge.calibration.reference_outputs import runner
from bridge.core.errors import InspectError
from bridge.core.progress import Progress
from bridge.sources.source import Source
from bridge.workflows.inspect.result import Inspection
from bridge.workflows.inspect.session import Session
from bridge.workflows.inspect.tracked import NO_BACKWARD, costs, finder_of

IGNORED = -100  # the label of a token that no loss counts


def run_batches(
    source: Source, session_of: Callable[..., Session], data: Data, steps: int | None, gradients: bool,
    device: str | None, progress: Progress, *, nan: bool, cost: bool,
) -> Inspection:  # fmt: skip
    """Run the batches of data, each a step of a session; with `cost` once more without it."""
    batches = (*data.batches, *data.held_out)[:steps]
    progress(0, len(batches), "load")
    model = copy_modules(source.load_model())  # the caller's stays where it is, and as it is
    model = (model.to(device) if device else model).eval().requires_grad_(gradients)
    run = partial(_backward, model, where=source.where) if gradients else runner(model, device)
    with finder_of(model, nan) as finder:
        session = session_of(model, finder=finder)
        try:
            for at, batch in enumerate(batches):
                progress(at, len(batches), "run")
                run(batch)
                session.step()
        finally:
            session.detach()
    progress(len(batches), len(batches), "run")
    if not cost:
        return session.inspection
    measured = costs(model, batches, run)
    notes = (*session.inspection.notes, *([] if gradients else [NO_BACKWARD]))
    return replace(session.inspection, costs=measured, notes=notes)


def _backward(model: Any, batch: Mapping[str, Any], where: str) -> None:
    """Run the next-token loss of all tokens that are no padding forward and backward."""
    import torch

    home = next(model.parameters()).device
    inputs = {name: tensor.to(home) for name, tensor in batch.items()}
    labels = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    labels = labels if mask is None else labels.masked_fill(mask == 0, IGNORED)
    try:
        with torch.enable_grad():
            model(**inputs, labels=labels).loss.backward()
    except TypeError as error:
        raise InspectError(f"{where}: gradients=True (--gradients) needs a model with a loss: {error}") from error
    model.zero_grad()
