"""One conversion under way: the values that every stage after the plan needs. Holds no state of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridge.planning import Plan
from bridge.progress import Progress, quiet

if TYPE_CHECKING:
    from bridge.output import Work
    from bridge.portions import Spread
    from bridge.quant.calibration import Calibration
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source


@dataclass(frozen=True)
class Written:
    """What a target has to tell after writing: policies by tensor, what was skipped and why, notes."""

    policies: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conversion:
    """`memory` is the byte budget of the stream, `workers` its threads, 0 for one a core.

    `spread`: who runs the stream, None for the process itself.
    """

    plan: Plan
    source: Source
    calibration: Calibration | None
    scheme: Scheme | None
    memory: int
    work: Work
    workers: int = 0
    progress: Progress = quiet
    spread: Spread | None = None
