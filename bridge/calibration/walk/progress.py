"""Progress of a walk over the blocks of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bridge.calibration.walk.blocks import Block
from bridge.core.progress import Progress


class WalkProgress:
    """Reports the work done: a run of a batch through a block counts the block's parameters, in thousands."""

    def __init__(self, report: Progress, sizes: Mapping[Block, int], runs: int) -> None:
        self._report, self._sizes = report, {block: 1 + (count >> 10) for block, count in sizes.items()}
        self._runs, self._done, self._total = runs, 0, sum(self._sizes.values()) * runs

    def skip(self, blocks: Collection[Block]) -> None:
        """Count blocks that an earlier run finished."""
        self._done += sum(self._sizes[block] for block in blocks) * self._runs

    def step(self, block: Block) -> None:
        """Count one batch through a block, and report."""
        self._done += self._sizes[block]
        self._report(min(self._done, self._total), self._total, "calibrate")
