"""How a walk runs, and what watches or measures its blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.statistics import FakeModel
from bridge.calibration.walk.budget import Room
from bridge.calibration.walk.states import Spill


class Watch:
    """Takes statistics of the unquantized model, without ModelOpt; this one takes none, so that blocks are only run.

    `modules`: the live modules that it watches; each runs once for a batch.
    """

    def __init__(self, modules: Collection[str]) -> None:
        self.modules = modules

    def prepare(self, model: Any) -> None:
        """Ready a model without weights."""

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """What runs next is of this batch."""

    def over(self, loop: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a loop over the data, watched; its model holds some of the modules."""
        return loop


class Probe(Protocol):
    """Measures each block on the held-out inputs after ModelOpt has calibrated it; outputs are not kept then."""

    def ready(self, model: Any) -> None:
        """Look at a model before it is cut into blocks."""

    def prepare(self, root: Any, bindings: Sequence[QuantizerBinding]) -> None:
        """Ready the part of a model that will be calibrated; it shares the weights of the unquantized block."""

    def runner(self, block: str, plain: Mapping[str, Any], calibrated: FakeModel) -> Callable[..., Any]:
        """Return what runs a block: batch, args, kwargs -> the output to go on with. `plain`: modules by live name."""

    def finish(self, batch: Mapping[str, Any], result: Any) -> None:
        """Take what the model returned for a batch."""


@dataclass(frozen=True)
class Options:
    """How a walk runs.

    `ahead`: read the next block while one runs: memory holds two. `spill`: where activations go that memory does not
    hold. `room`: what fits; None for every block.
    """

    ahead: bool = False
    spill: Spill | None = None
    room: Room | None = None
    watch: Watch | None = None
    probe: Probe | None = None
