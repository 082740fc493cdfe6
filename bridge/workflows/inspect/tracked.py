"""Find the first NaN of a run, and what modules cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from bridge.core.text import number

if TYPE_CHECKING:
    from bridge.tracker.cost import Cost
    from bridge.tracker.finite import NanFinder, NotFinite

Run = Callable[[Mapping[str, Any]], Any]
NO_BACKWARD = "bytes that modules keep for backward are counted with gradients=True (--gradients)"


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


def told(found: NotFinite | None, steps: int) -> list[str]:
    """A note where no NaN was found; a finding tells itself."""
    return [] if found else [f"no module made a NaN or an infinity in {number(steps, 'step')}"]
