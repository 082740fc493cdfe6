"""One conversion under way: the values that every stage after the plan needs. Holds no state of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridge.planning import Plan

if TYPE_CHECKING:
    from bridge.output import Work
    from bridge.quant.calibration import Calibration
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source

# Called as progress(done, total, text): bytes or items done, out of how many (0: unknown), and what is being done.
Progress = Callable[[int, int, str], None]


def quiet(done: int, total: int, text: str) -> None:
    """The progress of who asked for none."""


@dataclass(frozen=True)
class Written:
    """What a target has to tell after writing: policies by tensor, what was skipped and why, notes."""

    policies: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conversion:
    """`memory` is the byte budget of the stream, `workers` its threads."""

    plan: Plan
    source: Source
    calibration: Calibration | None
    scheme: Scheme | None
    memory: int
    work: Work
    workers: int = max(1, min(4, (os.cpu_count() or 2) - 1))  # one core makes the graph meanwhile
    progress: Progress = quiet
