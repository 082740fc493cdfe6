"""The queue of jobs: which may start, the longest first."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.workflows.batch.values import FAILED, Job, Outcome


class JobQueue:
    """The jobs of a batch that have not started. An engine takes `ready` jobs and reports every outcome."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._unfinished = set(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def ready(self) -> list[Job]:
        """Jobs that may start now: first those that others wait for, then the longest."""
        needed = {name for job in self._jobs.values() for name in job.after}
        free = [job for job in self._jobs.values() if not self._unfinished.intersection(job.after)]
        return sorted(free, key=lambda job: (job.name not in needed, -job.work, job.name))

    def take(self, job: Job) -> None:
        del self._jobs[job.name]

    def ended(self, outcome: Outcome) -> list[Outcome]:
        """Record how a job ended; return its outcome and those of jobs that cannot start because of it."""
        self._unfinished.discard(outcome.name)
        outcomes = [outcome]
        if outcome.status == FAILED:
            for job in [job for job in self._jobs.values() if outcome.name in job.after]:
                self.take(job)
                text = f"{outcome.name}: {outcome.error}"
                outcomes += self.ended(Outcome(job.name, FAILED, text, outcome.kind, because=outcome.name))
        return outcomes
