"""How a walk runs, and what watches or measures its blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.calibration.walk.block_errors import BlockProbe
from bridge.calibration.walk.budget import Room
from bridge.calibration.walk.states import Spill

if TYPE_CHECKING:
    from bridge.calibration.statistics import Statistics
    from bridge.calibration.walk.forwards import Batch


class Watch:
    """Takes statistics of the unquantized model, without ModelOpt; this one takes none, so that blocks are only run.

    `modules`: the live modules that it watches; each runs once for a batch. `experts`: single ones of stacks, too.
    `learns`: whether it replaces the weights of each block, which the data pass a second time as the blocks before left
    them.
    """

    learns = False

    def __init__(self, modules: Collection[str], experts: bool = False) -> None:
        self.modules, self.experts = modules, experts

    def prepare(self, model: Any) -> None:
        """Ready a model without weights: let it run expert by expert, if single experts are watched."""
        if self.experts and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """What runs next is of this batch."""

    def run(self, loop: Callable[[Any], None], model: Any) -> None:
        """Run a loop over the data, watched; the model holds some of the modules."""
        loop(model)

    def learn(self, block: Any, name: str, outputs: Sequence[Any], calls: Sequence[Batch]) -> Statistics:
        """Replace the weights of a block that `run` saw, and return what is kept of it.

        `outputs`: of the unquantized block. `calls`: the same batches as the blocks before left them.
        """
        raise NotImplementedError

    def end(self, seen: Statistics) -> None:
        """All blocks are done; `seen`: what was kept of them, by an earlier run as well."""


@dataclass(frozen=True)
class Options:
    """How a walk runs.

    `ahead`: read the next block while one runs: memory holds two. `spill`: where activations go that memory does not
    hold. `room`: what fits; None for every block. `probe`: measures each block; outputs are not kept then.
    """

    ahead: bool = False
    spill: Spill | None = None
    room: Room | None = None
    watch: Watch | None = None
    probe: BlockProbe | None = None
