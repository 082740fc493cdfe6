"""One calibration: model, scheme, data, and the resources it may use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.calibration.data import Data
from bridge.core.progress import Progress, no_progress
from bridge.core.values import Structure
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.calibration.walk.workers.processes import Workers


@dataclass(frozen=True)
class CalibrationJob:
    """What to calibrate, with which data, and where. Every function that runs a calibration takes one."""

    source: Source
    """The model, which the run does not change; `requirements.source_for` gives one that runs in float32."""
    structure: Structure
    """The matrices of the model, as `structure_of` finds them."""
    scheme: Scheme
    """The scheme that the statistics are for; it is bound to the sites of `structure` here."""
    data: Data
    """Batches to calibrate with and held-out ones, as `prepare` makes them."""
    device: str | None = None
    """Where the model runs, such as "cuda:1"; None leaves a model in memory where it is, else it is the CPU."""
    progress: Progress = no_progress
    """Called with the work done, the total, and the name of the stage."""
    needed: Collection[str] | None = None
    """The modules that will be quantized; None for all of the scheme. Unusable statistics of others are left out."""
    memory: int | None = None
    """Bytes that the run may take; None for most of `free`. A model above it runs block by block, to the same bytes."""
    partial: Path | None = None
    """A directory that keeps finished blocks, so that a killed run continues; None keeps nothing."""
    workers: Workers | None = None
    """The processes that share the batches, which run block by block; None for this process alone."""
    free: int | None = None
    """Free memory as it was read before, in bytes, so that all decisions agree; None reads it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", self.scheme.bound(self.structure.sites))
