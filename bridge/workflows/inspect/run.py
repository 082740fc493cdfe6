"""Run a model on data: sessions, the first NaN, costs of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.calibration.data import Data
from bridge.calibration.modelopt import copy_modules
from bridge.calibration.reference_outputs import runner
from bridge.core.errors import InspectError, UsageError
from bridge.core.progress import Progress
from bridge.core.text import number
from bridge.sources.source import Source
from bridge.workflows.inspect.result import Inspection
from bridge.workflows.inspect.session import Outputs, Session, Setup

if TYPE_CHECKING:
    from bridge.tracker.cost import Cost
    from bridge.tracker.finite import NanFinder, NotFinite

IGNORED = -100  # the label of a token that no loss counts
Run = Callable[[Mapping[str, Any]], Any]
NO_BACKWARD = "bytes that modules keep for backward are counted with gradients=True (--gradients)"


@dataclass(frozen=True)
class Passes:
    """How the batches run. `steps`: at most so many, None for all. `cost`: once more without statistics."""

    steps: int | None
    gradients: bool
    device: str | None
    nan: bool
    cost: bool

    def __post_init__(self) -> None:
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise UsageError(f"steps={self.steps!r} (--steps): expected a positive whole number")

    def of(self, data: Data) -> Sequence[Any]:
        """The batches that run."""
        return (*data.batches, *data.held_out)[: self.steps]

    def few(self, count: int) -> tuple[str, ...]:
        """A note, if the data make fewer steps than were asked for."""
        if not self.steps or self.steps <= count:
            return ()
        return (f"steps={self.steps} (--steps): the data make {number(count, 'step')}; give more rows (--samples)",)


def run_batches(
    source: Source, setup: Setup, outputs: Outputs, data: Data, passes: Passes, progress: Progress
) -> Inspection:
    """Run the batches of data, each a step of a session."""
    gradients, device = passes.gradients, passes.device
    batches = passes.of(data)
    progress(0, len(batches), "load")
    model = copy_modules(source.load_model())  # the caller's stays where it is, and as it is
    model = (model.to(device) if device else model).eval().requires_grad_(gradients)
    run = partial(_backward, model, where=source.where) if gradients else runner(model, device)
    with finder_of(model, passes.nan) as finder:
        session = Session(model, setup, outputs, finder=finder)
        try:
            for at, batch in enumerate(batches):
                progress(at, len(batches), "run")
                run(batch)
                session.step()
        finally:
            session.detach()
    progress(len(batches), len(batches), "run")
    found = session.inspection
    if passes.cost:
        measured = costs(model, batches, run)
        found = replace(found, costs=measured, notes=(*found.notes, *([] if gradients else [NO_BACKWARD])))
    return replace(found, notes=(*found.notes, *passes.few(len(batches))))


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


def finder_of(model: Any, nan: bool) -> AbstractContextManager[NanFinder | None]:
    """Looks for the first NaN or infinity of a model while it is entered, if `nan`."""
    if not nan:
        return nullcontext()
    from bridge.tracker.finite import NanFinder

    return NanFinder(model)


def first_bad(model: Any, batches: Sequence[Mapping[str, Any]], run: Run) -> NotFinite | None:
    """Run batches until a module makes a NaN or an infinity."""
    with finder_of(model, True) as finder:
        assert finder is not None
        for batch in batches:
            run(batch)
            if finder.first is not None:
                break
    return finder.first


def costs(model: Any, batches: Sequence[Mapping[str, Any]], run: Run) -> tuple[Cost, ...]:
    """Run batches, of which each calls the model once, and measure every module.

    It is a run of its own: statistics would be measured, too. Run a batch before, which allocates and compiles.
    """
    from bridge.tracker.cost import CostMeter

    with CostMeter(model) as meter:
        for batch in batches:
            run(batch)
    return meter.costs
