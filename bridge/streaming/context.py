"""Values that the stages after planning share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bridge.core.output.directory import Work
from bridge.core.progress import Progress, no_progress
from bridge.planning.plan import Output, Plan
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.source import Source

# Takes an output, C-contiguous bytes of it, and the offset in the tensor where they begin.
Sink = Callable[[Output, np.ndarray[Any, np.dtype[Any]], int], None]


@dataclass(frozen=True)
class WriteResult:
    """The result of writing a target: policies by tensor, what was skipped and why, notes."""

    policies: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    `policy`: how an unusual weight was handled, "" if it was not unusual. `spread`: the largest over the smallest amax
    of the steps that share a scale, None if the step shares none.
    """

    policy: str = ""
    spread: float | None = None

    def record(self) -> dict[str, Any]:
        """The fields for the journal; empty if there is nothing to report."""
        policy = {"policy": self.policy} if self.policy else {}
        return policy | ({} if self.spread is None else {"spread": self.spread})


@dataclass(frozen=True)
class FileSettings:
    """Layout of the target's files: the metadata of their headers, and the alignment of data in bytes."""

    metadata: Mapping[str, Any]
    align: int


@dataclass(frozen=True)
class ConversionContext:
    """One conversion under way. `memory`: the byte budget of the stream. `workers`: its threads, 0 for one per core.

    `executor` runs the stream in other processes; None runs it in this one.
    """

    plan: Plan
    source: Source
    calibration: Calibration | None
    scheme: Scheme | None
    memory: int
    work: Work
    files: FileSettings
    workers: int = 0
    progress: Progress = no_progress
    executor: Executor | None = None


@dataclass(frozen=True)
class Partition:
    """Some of a plan's steps, by their keys. `done`: the journal's records of those that are written already."""

    steps: tuple[str, ...]
    done: Mapping[str, Mapping[str, Any]]


class Executor(Protocol):
    """Runs partitions of a plan in other processes, which see the same files under the same paths."""

    @property
    def processes(self) -> int:
        """How many partitions run at once."""

    def run(
        self, context: ConversionContext, partitions: Sequence[Partition], stop: threading.Event
    ) -> Iterator[Mapping[str, StepResult]]:
        """Run each partition by `bridge.streaming.run.run_partition`, again if its process dies; yield its results.

        The first error ends the run; so do `stop` and closing the iterator. Nothing writes after that.
        """
