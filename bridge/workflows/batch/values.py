"""The values of a batch: rows, jobs, events, outcomes, engines.

All are picklable; no framework is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bridge.core.progress import BYTES
from bridge.core.text import size

# How a job ends. BELOW: written, but a gate of parity failed. PLANNED: a dry run would run this row.
DONE, BELOW, FAILED, PLANNED = "done", "below", "failed", "planned"
WORDS = {DONE: "done", BELOW: "FAILED parity", FAILED: "FAILED", PLANNED: "planned"}

# Arguments that only a calibration uses.
FOR_CALIBRATION = ("device", "data", "samples", "sequence", "field", "compute")


def folder_of_rules(calibration: Path) -> Path:
    """The folder of calibrations of single rules, while the best of them is chosen for `calibration`."""
    return calibration.with_suffix(".rules")


@dataclass(frozen=True)
class Row:
    """One conversion of a manifest: the arguments of `bridge.convert`, with absolute paths.

    Or one `chain`: the path of its file, whose steps have the arguments; `out` is then the folder of their outputs.
    `where` is its table in the manifest, for messages. `memory` is the stream's byte budget, None for the plan's
    figure. `data`, `samples`, `sequence`, `field`, `compute` are those of `bridge.calibrate`. `shards`: the number of
    processes that write the output, on an engine of several machines. `timeout`: seconds that the conversion may take.
    """

    name: str
    where: str
    model: str
    target: str
    out: str
    quant: str | None = None
    calib: str | None = None
    kv: str | None = None
    device: str | None = None
    config: Mapping[str, Any] | str | None = None
    tokenizer: str | None = None
    base: str | None = None
    adapter: str | None = None
    verify: bool = True
    overwrite: bool = False
    resume: bool = True
    data: str | None = None
    samples: int | str | None = None
    sequence: int | None = None
    memory: int | None = None
    shards: int = 1
    timeout: float | None = None
    runtime: str | None = None
    compute: str | None = None
    gate: str | None = None
    candidates: str | None = None
    rotate: str | None = None
    chain: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    field: str | None = None  # the last one: after it the function of that name is not seen


@dataclass(frozen=True)
class Job:
    """A row, or a calibration for rows; an engine runs it in its own process with `run_job` (`batch.job`).

    `calibrates`: the file that a calibration of `row` is saved to, "" for a conversion; `row.calib` of a conversion is
    such a file if it shares one. `memory`: planned bytes of its process. `work`: bytes read and written, an estimate of
    its duration. `after`: names of jobs that must succeed before this one starts. `runs`: run the output, as a
    conversion does that calibrates itself. `timeout`: seconds after its start until the engine kills it; what it has
    written can be resumed.
    """

    name: str
    row: Row
    memory: int
    work: int
    calibrates: str = ""
    after: tuple[str, ...] = ()
    runs: bool = False
    timeout: float | None = None

    @property
    def spread(self) -> bool:
        """True if other processes write the weights of the job."""
        return self.row.shards > 1 and not self.calibrates


@dataclass(frozen=True)
class Event:
    """The progress of a job: `done` of `total` (0: unknown) of `stage`, as in `bridge.core.progress.Progress`."""

    name: str
    stage: str
    done: int = 0
    total: int = 0

    @property
    def share(self) -> str:
        """How far the stage is: "40%", of bytes "1.2 GB of 3 GB"; "" if nobody knows."""
        if self.total and self.stage in BYTES:
            return f"{size(self.done)} of {size(self.total)}"
        return f"{self.done / self.total:.0%}" if self.total else ""


Watch = Callable[[Event], None]


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `error` is the message, `kind` its class: an error's name such as "TimeoutError", or "Crash".

    Of a row that failed parity or lint, `error` names the first of them, and `kind` is "".

    `cosine` and `norm_ratio` are the worst of all tensors, `relative_l2` that of the outputs if they were run.
    `kept`: the finished output of an earlier run was kept; `seconds` are those of that run. `because`: the failed job
    that this one depends on.
    """

    name: str
    status: str
    error: str = ""
    kind: str = ""
    seconds: float = 0.0
    bytes: int = 0
    tensors: int = 0
    plan_digest: str = ""
    peak_memory: int = 0
    cosine: float | None = None
    norm_ratio: float | None = None
    relative_l2: float | None = None
    kept: bool = False
    attempts: int = 1
    because: str = ""


@dataclass(frozen=True)
class Limits:
    """The limits of all jobs together: `workers` at once, `memory` in bytes; None: the engine decides."""

    workers: int | None = None
    memory: int | None = None


class Engine(Protocol):
    """Runs jobs. A module serves the manifest's `engine = "NAME"`: a built-in one, or that of an entry point.

    It has `Settings`, a frozen dataclass whose fields are the keys of the manifest's table `[NAME]`, and
    `make_engine(settings, limits) -> Engine`, which imports what the engine needs; its error stops the batch before
    anything is planned.
    """

    @property
    def workers(self) -> int:
        """The largest number of jobs that run at once."""

    @property
    def memory(self) -> int | None:
        """Bytes that one job can have at most, None if unknown; a job that needs more is refused."""

    @property
    def here(self) -> bool:
        """Whether jobs run on this machine; its devices and disk are then checked before work starts."""

    @property
    def sends(self) -> bool:
        """Whether outputs may be remote; they are written in the current directory first, where a row can resume."""

    def run(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome, None, None]:
        """Run every job, each after those it depends on, and yield each outcome at once; never raises for a job.

        `bridge.workflows.batch.engines.queue.JobQueue` decides which job may start, and fails those whose calibration
        failed. Closing the iterator (an interrupt) ends the running jobs: workers keep what is done, as `convert` does,
        and none remains.
        """


def line(outcome: Outcome, whole: bool = False) -> str:
    """An outcome in one line; `whole`: with all lines of an error, indented."""
    if outcome.because:
        return f"{outcome.name}: FAILED: {outcome.because} failed"
    if outcome.status == FAILED:
        first, _, more = outcome.error.partition("\n")
        error = outcome.error.replace("\n", "\n    ") if whole else first + " ..." * bool(more)
        return f"{outcome.name}: FAILED: {outcome.kind}: {error}"
    written = f", {size(outcome.bytes)}" if outcome.bytes else ""
    how = "by an earlier run" if outcome.kept else f"in {outcome.seconds:.1f} s"
    why = f": {outcome.error}" if outcome.error else ""
    return f"{outcome.name}: {WORDS[outcome.status]} {how}{written}{why}"
