"""Which jobs may start: those whose calibration is there, the longest first; runs nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.batches.values import FAILED, Job, Outcome


class Waiting:
    """The jobs of a batch that have not started. An engine takes what is `ready`, and tells every outcome."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._open = set(self._jobs)  # neither ended nor given up

    def __len__(self) -> int:
        return len(self._jobs)

    def ready(self) -> list[Job]:
        """Those that may start now: what others wait for before the rest, the longest first."""
        needed = {name for job in self._jobs.values() for name in job.after}
        free = [job for job in self._jobs.values() if not self._open.intersection(job.after)]
        return sorted(free, key=lambda job: (job.name not in needed, -job.work, job.name))

    def take(self, job: Job) -> None:
        """`job` is started now."""
        del self._jobs[job.name]

    def told(self, outcome: Outcome) -> list[Outcome]:
        """Note how a job ended; the outcomes of those that cannot start because of it, it first."""
        self._open.discard(outcome.name)
        found = [outcome]
        if outcome.status == FAILED:
            for job in [job for job in self._jobs.values() if outcome.name in job.after]:
                self.take(job)
                text = f"{outcome.name}: {outcome.error}"
                found += self.told(Outcome(job.name, FAILED, text, outcome.kind, because=outcome.name))
        return found
