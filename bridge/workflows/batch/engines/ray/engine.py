"""The engine "ray": jobs and shards of large rows as Ray tasks.

    engine = "ray"

    [ray]
    address = "10.0.0.1:6379"      # without it a local cluster is started, and ended with the batch

    [[row]]
    model = "/shared/llama-405b"
    shards = 8                     # eight processes write its output at once

All nodes must see models and outputs under the same paths. A row whose process dies resumes from its journal on the
same machine, and starts again on another; a row that fails with an error does not run again. Set a `runtime_env` with
Ray's own means: in the cluster, with `ray job submit`, or with `ray.init` before `bridge.batch`.
"""

from __future__ import annotations

import importlib.util
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bridge.core.errors import UsageError
from bridge.core.machine import available_memory, cores
from bridge.core.version import install
from bridge.workflows.batch.engines.queue import JobQueue
from bridge.workflows.batch.job import CRASH, overdue
from bridge.workflows.batch.values import FAILED, Event, Job, Limits, Outcome, Watch

if TYPE_CHECKING:
    from bridge.workflows.batch.engines.ray.calls import Calls, Ended

OBJECTS = 128 << 20  # bytes of a local cluster's object store: for plans and calibrations, not for weights
TIMEOUT = 10.0  # seconds to connect to the cluster's address
LOCAL = "local"  # Ray's address for a new cluster, even if one runs already


@dataclass(frozen=True)
class Settings:
    """The manifest's table `[ray]`.

    `address`: as for `ray.init`, "" for a local cluster that ends with the batch. `cpus`: of a job, and of each process
    that writes for it. `retries`: how often a job continues after its process died.
    """

    address: str = ""
    cpus: int = 1
    retries: int = 3


def make_engine(settings: Settings, limits: Limits) -> Ray:
    """Find out how many jobs the cluster runs at once, and how large one may be."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"engine = 'ray' needs Ray: {install('ray')}")
    if settings.cpus < 1 or settings.retries < 0:
        raise UsageError(f"[ray] cpus = {settings.cpus}, retries = {settings.retries}; expected 1 and 0 or more")
    import ray

    here = not settings.address and not ray.is_initialized()
    if here:
        nodes = [(float(_own_cpus(settings, limits)), limits.memory or available_memory())]
    else:
        with _cluster(settings, limits):
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            nodes = [(has.get("CPU", 0.0), int(has.get("memory", 0))) for has in alive]
    max_cpus = max((cpus for cpus, _ in nodes), default=0.0)
    if settings.cpus > max_cpus:
        raise UsageError(f"[ray] cpus = {settings.cpus}; the largest node of the cluster has {max_cpus:g}")
    at_once = sum(int(cpus) // settings.cpus for cpus, _ in nodes)
    max_memory = max(memory for _, memory in nodes)
    return Ray(settings, limits, limits.workers or at_once, min(max_memory, limits.memory or max_memory), here)


@dataclass(frozen=True)
class Ray:
    """See `bridge.workflows.batch.values.Engine`."""

    settings: Settings
    limits: Limits
    workers: int
    memory: int
    here: bool
    sends: bool = False

    def run(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Outcome]:
        if not jobs:
            return
        with _cluster(self.settings, self.limits):
            import ray

            from bridge.workflows.batch.engines.ray.calls import Calls
            from bridge.workflows.batch.engines.ray.rows import Board

            queue, running, since = JobQueue(jobs), dict[str, Job](), dict[str, float]()
            board = ray.remote(Board).options(num_cpus=0).remote()

            def watch_events() -> None:
                for event in _taken(board):
                    if event.name in running:
                        since.setdefault(event.name, time.monotonic())
                        watch(event)

            def again(name: str) -> None:
                watch_events()  # the last event of the dead attempt must not start the clock of the next
                since.pop(name, None)
                watch(Event(name, "again: its process died"))

            with closing(Calls(self.settings.retries, again)) as calls:
                while True:
                    self._start(queue, running, calls, board)
                    if not running:
                        return
                    for ended in calls.ended():
                        del running[ended.key]
                        yield from queue.ended(_outcome(ended))
                    watch_events()
                    for job, seconds in _overdue(running, since):
                        calls.stop(job.name)
                        del running[job.name]
                        yield from queue.ended(overdue(job, seconds))

    def _start(self, queue: JobQueue, running: dict[str, Job], calls: Calls, board: Any) -> None:
        """Submit the jobs that may start, within the limits; Ray decides where and when they run.

        Only one spread job at a time: it keeps its own memory while it waits for its shards, so two could deadlock.
        """
        from bridge.workflows.batch.engines.ray.rows import run_here

        for job in queue.ready():
            busy = list(running.values())
            if len(busy) >= self.workers or (job.spread and any(other.spread for other in busy)):
                continue
            if busy and self.limits.memory and sum(map(_charge, (*busy, job))) > self.limits.memory:
                continue
            queue.take(job)
            running[job.name] = job
            resources = {
                "num_cpus": 0 if job.spread else self.settings.cpus,  # a spread job only waits for its shards
                "num_gpus": 1 if (job.row.device or "").startswith("cuda") else 0,
                "memory": min(job.memory, self.memory),
            }
            calls.start(job.name, run_here, job, board, self.settings.cpus, self.settings.retries, **resources)


def _overdue(running: dict[str, Job], since: dict[str, float]) -> list[tuple[Job, float]]:
    """Overdue jobs and their seconds. `since`: when the first event of each came."""
    now = time.monotonic()
    ran = [(job, now - since[name]) for name, job in running.items() if name in since]
    return [(job, seconds) for job, seconds in ran if job.timeout is not None and seconds >= job.timeout]


def _charge(job: Job) -> int:
    """Bytes that a job may take on all nodes together."""
    return job.memory * (1 + job.row.shards if job.spread else 1)


def _outcome(ended: Ended) -> Outcome:
    if ended.error is None:
        outcome: Outcome = ended.result
        return replace(outcome, attempts=ended.attempts)
    if ended.died:
        text = f"its process died {ended.attempts} times; run the batch again: the row resumes where it stopped"
        return Outcome(ended.key, FAILED, f"{text}\n{ended.error}", CRASH, attempts=ended.attempts)
    text = f"Ray could not run it: {type(ended.error).__name__}: {ended.error}"
    return Outcome(ended.key, FAILED, text, CRASH, attempts=ended.attempts)


def _taken(board: Any) -> list[Event]:
    """The new events of jobs; none if the board died with its node."""
    import ray

    try:
        return ray.get(board.take.remote())  # type: ignore[no-any-return]
    except ray.exceptions.RayError:
        return []


def _own_cpus(settings: Settings, limits: Limits) -> int:
    return max(cores(), (limits.workers or 1) * settings.cpus)


def _check_listens(address: str) -> None:
    """Refuse an address that does not accept connections: Ray would retry for many minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"[ray] address = {address!r} cannot be reached: {error}") from error


@contextmanager
def _cluster(settings: Settings, limits: Limits) -> Iterator[None]:
    """Connect to the caller's Ray if there is one, else to the manifest's cluster, else to a new local one."""
    import ray

    if ray.is_initialized():
        yield
        return
    own: dict[str, Any] = {}
    if not settings.address:
        own = {
            "num_cpus": _own_cpus(settings, limits),
            "_memory": limits.memory or available_memory(),
            "object_store_memory": OBJECTS,
            "include_dashboard": False,
        }
    _check_listens(settings.address)
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(settings.address or LOCAL, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = f"[ray] address = {settings.address!r} cannot be reached" if settings.address else "Ray does not start"
        raise UsageError(f"{where}: {error}") from error
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)  # Ray replaces it
    try:
        yield
    finally:
        ray.shutdown()
