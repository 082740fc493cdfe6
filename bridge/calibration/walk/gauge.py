"""What watches or measures the blocks of a walk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.statistics import FakeModel


class Watch(Protocol):
    """Takes statistics of the unquantized model, without ModelOpt."""

    @property
    def modules(self) -> Collection[str]:
        """The live modules that it watches; each runs once for a batch."""

    def prepare(self, model: Any) -> None:
        """Ready a model without weights."""

    def over(self, loop: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a loop over the data, watched; its model holds some of the modules."""


class Gauge(Protocol):
    """Measures each block on the held-out inputs after ModelOpt has calibrated it; answers are not kept then."""

    def ready(self, model: Any) -> None:
        """Look at a model before it is cut into blocks."""

    def prepare(self, root: Any, bindings: Sequence[QuantizerBinding]) -> None:
        """Ready the part of a model that will be calibrated; it shares the weights of the unquantized block."""

    def runner(self, block: str, plain: Mapping[str, Any], calibrated: FakeModel) -> Callable[..., Any]:
        """Return what runs a block: batch, args, kwargs -> the output to go on with. `plain`: modules by live name."""

    def finish(self, batch: Mapping[str, Any], result: Any) -> None:
        """Take what the model returned for a batch."""
