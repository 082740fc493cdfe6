"""The engine "local": worker processes on this machine, under one memory budget.

A worker that dies fails one row only. A job starts when its planned memory fits next to the running jobs; these share
the cores.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from bridge.core.machine import available_memory, cores
from bridge.workflows.batch.engines.pool import Pool, Worker
from bridge.workflows.batch.engines.queue import JobQueue
from bridge.workflows.batch.values import Event, Job, Limits, Outcome, Watch


@dataclass(frozen=True)
class Settings:
    """The manifest's table `[local]`, which has no keys."""


def make_engine(settings: Settings, limits: Limits) -> Local:
    """Make the engine; by default with one worker per core and the free memory."""
    return Local(limits.workers or cores(), limits.memory or available_memory())


@dataclass(frozen=True)
class Local:
    """See `bridge.workflows.batch.values.Engine`."""

    workers: int
    memory: int
    here: bool = True
    sends: bool = True

    def run(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome, None, None]:
        queue = JobQueue(jobs)
        with closing(Pool()) as pool:
            while True:
                for outcome in self._start(queue, pool):
                    yield from queue.ended(outcome)
                if not pool.busy:
                    return
                for message in pool.messages():
                    if isinstance(message, Event):
                        watch(message)
                    else:
                        yield from queue.ended(message)

    def _start(self, queue: JobQueue, pool: Pool) -> Iterator[Outcome]:
        """Start jobs that fit, the longest first; if none runs, start one in any case. Yields failed starts."""
        while len(pool.busy) < self.workers and (ready := queue.ready()):
            job = next((job for job in ready if self._fits(job, pool)), None)
            if job is None and not pool.busy:
                job = ready[0]
                pool.end_idle()
            if job is None:
                return
            queue.take(job)
            at_once = min(self.workers, len(pool.busy) + len(queue.ready()) + 1)
            if failed := pool.start(job, _cores(pool.busy, at_once)):
                yield failed

    def _fits(self, job: Job, pool: Pool) -> bool:
        """True if the job fits next to the running jobs; idle workers are ended if only they are in its way."""
        free = self.memory - sum(worker.charge for worker in pool.busy)
        if job.memory > free:
            return False
        if job.memory + sum(worker.resident for worker in pool.idle) > free:  # one of them may take the job
            pool.end_idle()
        return True


def _cores(busy: Sequence[Worker], at_once: int) -> tuple[int, ...]:
    """The cores of one of `at_once` jobs, those with the fewest running jobs first; () if unsupported."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    ours = sorted(os.sched_getaffinity(0))
    taken = [core for worker in busy for core in worker.cores]
    ours.sort(key=taken.count)
    return tuple(sorted(ours[: max(len(ours) // at_once, 1)]))
