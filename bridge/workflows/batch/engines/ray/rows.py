"""Functions for Ray processes: a job, or part of a large row.

They keep no state between calls and know only their arguments: every process opens its model itself, on the shared
file system.
"""

from __future__ import annotations

import io
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from bridge.core.errors import BridgeError, SourceError, UsageError, WriteError
from bridge.core.machine import keep_pages
from bridge.core.output.directory import Work
from bridge.core.version import __version__
from bridge.planning.memory import FRESH
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.opening import open_source
from bridge.sources.rotated.opening import rotated
from bridge.sources.source import Source
from bridge.streaming.context import ConversionContext, Partition, StepResult
from bridge.streaming.run import run_partition
from bridge.targets import file_settings
from bridge.workflows.batch.engines.ray.calls import Calls
from bridge.workflows.batch.engines.worker import forget_peak, release_memory, use_cores
from bridge.workflows.batch.job import run_job
from bridge.workflows.batch.manifest.keys import redacted
from bridge.workflows.batch.values import Event, Job, Outcome, Row

HEADERS = 64 << 20  # bytes of a plan with 100,000 tensors and of the layout of its files


class Board:
    """An actor that keeps the last event of each job until it is taken."""

    def __init__(self) -> None:
        self._events: dict[str, Event] = {}

    def post(self, event: Event) -> None:
        self._events[event.name] = event

    def take(self) -> list[Event]:
        taken, self._events = list(self._events.values()), {}
        return taken


def run_here(job: Job, board: Any, cpus: int, retries: int) -> Outcome:
    """Run a job in this process of the cluster."""
    executor = Partitions(job, cpus, retries) if job.spread else None
    keep_pages()
    with own_cores(0 if executor else cpus):
        forget_peak()
        outcome = run_job(job, _poster(board), executor)
        release_memory()
    return outcome


def _poster(board: Any) -> Any:
    """Send events to the board; those that come before the last one has arrived are dropped."""
    last: list[Any] = []
    lock = threading.Lock()

    def post(event: Event) -> None:
        with lock:
            if not last or ray.wait(last, timeout=0)[0]:
                last[:] = [board.post.remote(event)]

    return post


@dataclass(frozen=True)
class Offer:
    """What every partition of a row needs. `fingerprint`: of the source, which each process opens itself."""

    row: Row
    fingerprint: str
    plan: Plan
    calibration: Calibration | None
    scheme: Scheme | None
    memory: int
    cpus: int
    directory: Path
    identity: str
    version: str


class Partitions:
    """Streams a row's weights in calls to the cluster (see `bridge.streaming.context.Executor`)."""

    def __init__(self, job: Job, cpus: int, retries: int) -> None:
        self._job, self._cpus, self._retries = job, cpus, retries
        self.processes = job.row.shards

    def run(
        self, context: ConversionContext, partitions: Sequence[Partition], stop: threading.Event
    ) -> Iterator[Mapping[str, StepResult]]:
        memory = FRESH + HEADERS + context.memory
        self._check_memory(memory)
        offer, waiting = ray.put(self._offer(context)), deque(enumerate(partitions))
        with closing(Calls(self._retries)) as calls:
            while (waiting or calls) and not stop.is_set():
                while waiting and len(calls) < self.processes:
                    number, partition = waiting.popleft()
                    calls.start(str(number), write_partition, offer, partition, num_cpus=self._cpus, memory=memory)
                for ended in calls.ended():
                    if ended.died:
                        raise WriteError(
                            f"{self._job.row.out}: a process that wrote a part of it died, {ended.attempts} times "
                            f"({ended.error}); the kernel kills processes if memory runs out: set fewer `shards`"
                        )
                    if ended.error:
                        raise ended.error
                    yield ended.result

    def _offer(self, context: ConversionContext) -> Offer:
        return Offer(
            self._job.row, context.source.fingerprint, context.plan, context.calibration, context.scheme,
            context.memory, self._cpus, context.work.directory, context.work.identity, __version__,
        )  # fmt: skip

    def _check_memory(self, memory: int) -> None:
        """Refuse what Ray would wait for forever: the row keeps its own memory while others write for it."""
        here = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        free = [n["Resources"].get("memory", 0) - (self._job.memory if n["NodeID"] == here else 0) for n in nodes]
        if max(free) < memory:
            raise UsageError(
                f"shards = {self.processes}: a part of the output needs {memory / 1e9:.2f} GB in addition to the row's "
                f"own {self._job.memory / 1e9:.2f} GB, and no node has them; leave `shards` out, or use larger nodes"
            )


def write_partition(offer: Offer, partition: Partition) -> Mapping[str, StepResult]:
    """Write a partition of the conversion of another process, in this process of the cluster."""
    source = same_source(offer)
    keep_pages()
    with own_cores(offer.cpus):
        work = Work(offer.directory, partition.done, io.StringIO(), offer.identity)
        context = ConversionContext(
            offer.plan, source, offer.calibration, offer.scheme, offer.memory, work, file_settings(offer.plan, source)
        )
        results = run_partition(context, offer.directory, partition)
        release_memory()
    return results


def same_source(offer: Offer) -> Source:
    """Open the row's model on this node; an error if it is a different one."""
    node, row, model = socket.gethostname(), offer.row, redacted(offer.row.model)
    if offer.version != __version__:
        raise UsageError(
            f"{node} has qbridge {__version__}, the row's node has {offer.version}; install the same version on all"
        )
    try:
        source = rotated(open_source(row.model, row.config, None, row.base, row.adapter), row.rotate)
    except BridgeError as error:
        raise SourceError(f"{model}: cannot be opened on {node}, unlike on the row's node: {error}") from error
    if source.fingerprint != offer.fingerprint:
        raise SourceError(f"{model} is a different model on {node}; put it on a file system that all nodes share")
    return source


@contextmanager
def own_cores(count: int) -> Iterator[None]:
    """Run on `count` cores, if possible on cores that no other process of bridge has; 0 for all.

    Ray counts CPUs but does not assign them: each process would start as many threads as the node has cores, with
    buffers for each.
    """
    threads = os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets one thread; the affinity is more precise
    every, free = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [], list[int]()
    with ExitStack() as stack:
        if threads is not None:
            stack.callback(os.environ.__setitem__, "OMP_NUM_THREADS", threads)
        for core in every:
            if len(free) < count and _lock(core, stack):
                free.append(core)
        others = [core for core in every if core not in free]
        use_cores((*free, *others)[: count or None])
        try:
            yield
        finally:
            use_cores(tuple(every))


def _lock(core: int, stack: ExitStack) -> bool:
    """Bind an abstract socket name, which only one process at a time can have; no file remains."""
    lock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        lock.bind(f"\0qbridge/{os.getuid()}/{core}")
    except OSError:
        return False
    return True
