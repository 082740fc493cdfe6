"""The engine "local": worker processes here, under one budget of memory; a worker that dies is one failed row, no more.

What a job takes was planned; a job starts when that fits beside what runs. Cores are divided among the jobs that run.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from bridge.batches.pool import Pool, Worker
from bridge.batches.values import Event, Job, Limits, Outcome, Watch
from bridge.batches.waiting import Waiting
from bridge.budget import available_memory, cores


@dataclass(frozen=True)
class Settings:
    """The manifest's table `[local]`: it takes no keys."""


def make_engine(settings: Settings, limits: Limits) -> Local:
    """As many workers as there are cores and as much memory as is free, where nobody says otherwise."""
    return Local(limits.workers or cores(), limits.memory or available_memory())


@dataclass(frozen=True)
class Local:
    """See `bridge.batches.values.Engine`."""

    workers: int
    memory: int
    here: bool = True
    sends: bool = True

    def run(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome, None, None]:
        waiting = Waiting(jobs)
        with closing(Pool()) as pool:
            while True:
                for outcome in self._start(waiting, pool):
                    yield from waiting.told(outcome)
                if not pool.busy:
                    return
                for told in pool.told():
                    if isinstance(told, Event):
                        watch(told)
                    else:
                        yield from waiting.told(told)

    def _start(self, waiting: Waiting, pool: Pool) -> Iterator[Outcome]:
        """Start what fits, the longest first; where nothing runs, one starts in any case. Yields what cannot start."""
        while len(pool.busy) < self.workers and (ready := waiting.ready()):
            fitting = next((job for job in ready if self._fits(job, pool)), None)
            if fitting is None and not pool.busy:
                fitting = ready[0]
                pool.end_idle()
            if fitting is None:
                return
            waiting.take(fitting)
            beside = min(self.workers, len(pool.busy) + len(waiting.ready()) + 1)
            if failed := pool.start(fitting, _share(pool.busy, beside)):
                yield failed

    def _fits(self, job: Job, pool: Pool) -> bool:
        """True where the job fits beside what runs; workers that idle are ended where only they are in its way."""
        free = self.memory - sum(worker.charge for worker in pool.busy)
        if job.memory > free:
            return False
        if job.memory + sum(worker.resident for worker in pool.idle) > free:  # one of them may take the job
            pool.end_idle()
        return True


def _share(busy: Sequence[Worker], beside: int) -> tuple[int, ...]:
    """The cores of one of `beside` jobs, those first that the fewest running jobs have; () where nobody may choose."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    ours = sorted(os.sched_getaffinity(0))
    taken = [core for worker in busy for core in worker.cores]
    ours.sort(key=taken.count)
    return tuple(sorted(ours[: max(len(ours) // beside, 1)]))
