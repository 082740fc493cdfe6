"""The engine "ray": jobs, and the output shards of large rows, as tasks of a Ray cluster; must never write a model.

    engine = "ray"

    [ray]
    address = "10.0.0.1:6379"      # without it a cluster is started here, and ended with the batch

    [[row]]
    model = "/shared/llama-405b"
    shards = 8                     # eight processes write its output at once

All nodes see models and outputs under the same paths. A row whose process dies goes on from its journal on the same
machine, and begins anew on another; one that fails in our words does not run again. A `runtime_env` is left to Ray's
own ways: the cluster's, `ray job submit`'s, or the caller's `ray.init` before `bridge.batch`.
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

from bridge.batches.job import CRASH, overdue
from bridge.batches.values import FAILED, Event, Job, Limits, Outcome, Watch
from bridge.batches.waiting import Waiting
from bridge.budget import available_memory, cores
from bridge.errors import UsageError

if TYPE_CHECKING:
    from bridge.batches.ray_calls import Calls, Ended

OBJECTS = 128 << 20  # bytes of a local cluster's object store: plans and calibrations pass through it, no weights
PATIENCE = 10.0  # seconds until an address counts as one where nobody listens
LOCAL = "local"  # Ray's word for a cluster of its own, whatever runs here already


@dataclass(frozen=True)
class Settings:
    """The manifest's table `[ray]`.

    `address`: as `ray.init` takes it, "" for a cluster of this machine that ends with the batch. `cpus`: what a job,
    and each process that writes for it, is given. `retries`: how often a job goes on after its process died.
    """

    address: str = ""
    cpus: int = 1
    retries: int = 3


def make_engine(settings: Settings, limits: Limits) -> Ray:
    """Look at the cluster: how many jobs it runs at once, and how large one may be."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("engine = \"ray\" needs Ray: pip install 'qbridge[ray]'")
    if settings.cpus < 1 or settings.retries < 0:
        raise UsageError(f"[ray] cpus = {settings.cpus}, retries = {settings.retries}; expected 1 and 0 or more")
    import ray

    here = not settings.address and not ray.is_initialized()
    if here:
        found = [(float(_own_cpus(settings, limits)), limits.memory or available_memory())]
    else:
        with _cluster(settings, limits):
            found = [_size(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    largest = max((cpus for cpus, _ in found), default=0.0)
    if settings.cpus > largest:
        raise UsageError(f"[ray] cpus = {settings.cpus}; the largest node of the cluster has {largest:g}")
    at_once = sum(int(cpus) // settings.cpus for cpus, _ in found)
    most = max(memory for _, memory in found)
    return Ray(settings, limits, limits.workers or at_once, min(most, limits.memory or most), here)


@dataclass(frozen=True)
class Ray:
    """See `bridge.batches.values.Engine`."""

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

            from bridge.batches.ray_calls import Calls
            from bridge.batches.ray_rows import Board

            waiting, running, since = Waiting(jobs), dict[str, Job](), dict[str, float]()
            board = ray.remote(Board).options(num_cpus=0).remote()

            def hear() -> None:
                for event in _taken(board):
                    if event.name in running:
                        since.setdefault(event.name, time.monotonic())
                        watch(event)

            def again(name: str) -> None:
                hear()  # the last word of the try that died must not start the clock of the next
                since.pop(name, None)
                watch(Event(name, "again: its process died"))

            with closing(Calls(self.settings.retries, again)) as calls:
                while True:
                    self._start(waiting, running, calls, board)
                    if not running:
                        return
                    for ended in calls.ended():
                        del running[ended.key]
                        yield from waiting.told(_outcome(ended))
                    hear()
                    for job, seconds in _overdue(running, since):
                        calls.stop(job.name)
                        del running[job.name]
                        yield from waiting.told(overdue(job, seconds))

    def _start(self, waiting: Waiting, running: dict[str, Job], calls: Calls, board: Any) -> None:
        """Hand out what may start, as much as was allowed; where a job runs, and when, is Ray's.

        One spread job at a time: it holds its own memory while it waits for its shards, and two could wait for ever.
        """
        from bridge.batches.ray_rows import is_spread, run_here

        for job in waiting.ready():
            busy = list(running.values())
            if len(busy) >= self.workers or (is_spread(job) and any(map(is_spread, busy))):
                continue
            if busy and self.limits.memory and sum(map(_charge, (*busy, job))) > self.limits.memory:
                continue
            waiting.take(job)
            running[job.name] = job
            resources = {
                "num_cpus": 0 if is_spread(job) else self.settings.cpus,  # it waits, and must not be in its shards' way
                "num_gpus": 1 if (job.row.device or "").startswith("cuda") else 0,
                "memory": min(job.memory, self.memory),
            }
            calls.start(job.name, run_here, job, board, self.settings.cpus, self.settings.retries, **resources)


def _overdue(running: dict[str, Job], since: dict[str, float]) -> list[tuple[Job, float]]:
    """Jobs that have run for longer than they may, and the seconds. `since`: when the first word of each came."""
    now = time.monotonic()
    ran = [(job, now - since[name]) for name, job in running.items() if name in since]
    return [(job, seconds) for job, seconds in ran if job.timeout is not None and seconds >= job.timeout]


def _charge(job: Job) -> int:
    """Bytes that a job may take on all nodes together."""
    from bridge.batches.ray_rows import is_spread

    return job.memory * (1 + job.row.shards if is_spread(job) else 1)


def _outcome(ended: Ended) -> Outcome:
    if ended.error is None:
        answer: Outcome = ended.answer
        return replace(answer, attempts=ended.attempts)
    if ended.died:
        text = f"its process died, {ended.attempts} times over; run the batch again: the row goes on from where it was"
        return Outcome(ended.key, FAILED, f"{text}\n{ended.error}", CRASH, attempts=ended.attempts)
    text = f"Ray could not run it: {type(ended.error).__name__}: {ended.error}"
    return Outcome(ended.key, FAILED, text, CRASH, attempts=ended.attempts)


def _taken(board: Any) -> list[Event]:
    """What jobs told since the last look; a board that died with its node is no reason to end."""
    import ray

    try:
        return ray.get(board.take.remote())  # type: ignore[no-any-return]
    except ray.exceptions.RayError:
        return []


def _size(resources: dict[str, float]) -> tuple[float, int]:
    return resources.get("CPU", 0.0), int(resources.get("memory", 0))


def _own_cpus(settings: Settings, limits: Limits) -> int:
    return max(cores(), (limits.workers or 1) * settings.cpus)


def _check_listens(address: str) -> None:
    """Refuse an address where nobody listens: Ray would try it again for many minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"[ray] address = {address!r} cannot be reached: {error}") from error


@contextmanager
def _cluster(settings: Settings, limits: Limits) -> Iterator[None]:
    """Be connected: to the caller's Ray where there is one, else to that of the manifest, or to one of our own."""
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
            signal.signal(signal.SIGTERM, before)  # Ray takes it for itself
    try:
        yield
    finally:
        ray.shutdown()
