"""The values of a batch: rows, jobs, events, outcomes, and what an engine is; picklable, and imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# How a job ends; BELOW: written, parity below its threshold. PLANNED: what a dry run says of a row that would run.
DONE, BELOW, FAILED, PLANNED = "done", "below", "failed", "planned"


@dataclass(frozen=True)
class Row:
    """One conversion that a manifest asks for: the arguments of `bridge.convert`, paths made absolute.

    `where` is its place in the manifest, for messages. `memory` is the stream's byte budget, None for what the plan
    says. `samples` and `sequence` are those of `bridge.calibrate`. `shards`: in how many parts an engine of several
    machines makes the output; 1 makes it in one process. `timeout`: seconds that the conversion may take.
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
    verify: bool = True
    overwrite: bool = False
    resume: bool = True
    samples: int | None = None
    sequence: int | None = None
    memory: int | None = None
    shards: int = 1
    timeout: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What an engine runs, in a process of its own, by `bridge.batches.job.run_job`: a row, or a calibration for rows.

    `calibrates`: the file that a calibration of `row` goes to; "" for a conversion, whose `row.calib` is such a file
    where it shares one. `memory`: bytes that its process takes at most, as planned. `work`: how long it takes beside
    other jobs, in bytes read and written. `after`: names of the jobs that must have ended well before this one starts.
    `runs`: what it writes is run, as a conversion that calibrates for itself does. `timeout`: seconds from its start
    after which the engine stops it as a kill would: what it has written is left to be resumed.
    """

    name: str
    row: Row
    memory: int
    work: int
    calibrates: str = ""
    after: tuple[str, ...] = ()
    runs: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class Event:
    """How far a job is: `done` of `total` (0: unknown) of `stage`, as `bridge.progress.Progress` tells it."""

    name: str
    stage: str
    done: int = 0
    total: int = 0


Watch = Callable[[Event], None]


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `error` is the message, `kind` the class of it: an error's name, "TimeoutError" say, or "Crash".

    `cosine` and `norm_ratio` are the worst of all tensors, `relative_l2` that of the outputs where they were run.
    `kept`: a finished output of an earlier run was found and left as it is; `seconds` are what that run took.
    `because`: the job without which this one could not start.
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
    """What all jobs together may take: `workers` at once, `memory` in bytes; None: what the engine finds."""

    workers: int | None = None
    memory: int | None = None


class Engine(Protocol):
    """Runs jobs. A module `bridge.batches.NAME` offers one to the manifest's `engine = "NAME"`: `Settings`, a frozen
    dataclass whose fields are the keys of the manifest's table `[NAME]`, and `make_engine(settings, limits) -> Engine`,
    the first to import what it needs; an error of it stops the batch before anything is planned.
    """

    @property
    def workers(self) -> int:
        """How many jobs it runs at once, at most."""

    @property
    def memory(self) -> int | None:
        """Bytes that one job can have at most, None where it cannot tell; a job that needs more is refused."""

    @property
    def here(self) -> bool:
        """Whether jobs run on this machine: then its devices and its disk are checked before work starts."""

    @property
    def sends(self) -> bool:
        """Whether outputs may be remote: they are made in the current directory, where a row that died goes on."""

    def run(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome, None, None]:
        """Run every job, each after those it names, and yield each outcome when it is there; never raises for a job.

        Which job may start, and what becomes of those whose calibration failed, is `bridge.batches.waiting.Waiting`'s.
        Closing the iterator (an interrupt) ends what runs: workers clean up as `convert` does, and none is left.
        """
