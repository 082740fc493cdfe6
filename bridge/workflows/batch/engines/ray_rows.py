"""What runs in a Ray cluster's processes: a job, and portions of a large row's output; must keep nothing between calls.

Only what is in the arguments is known here: every process opens its model itself, on the file system that all share.
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
from typing import TYPE_CHECKING, Any

import ray

from bridge import __version__
from bridge.batches.job import run_job
from bridge.batches.naming import told
from bridge.batches.planning import FRESH
from bridge.batches.ray_calls import Calls
from bridge.batches.values import Event, Job, Outcome
from bridge.batches.worker import forget_peak, give_back, use_cores
from bridge.conversion import Conversion
from bridge.errors import BridgeError, SourceError, UsageError, WriteError
from bridge.opening import open_model
from bridge.output import Work
from bridge.terminal import keep_pages, load_kernels

if TYPE_CHECKING:
    from bridge.planning import Plan
    from bridge.portions import Portion
    from bridge.quant.calibration import Calibration
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source

HEADERS = 64 << 20  # bytes of a plan, and of the layout of its files, with 100,000 tensors


class Board:
    """Where jobs say how far they are, an actor: the last word of each, until it is taken."""

    def __init__(self) -> None:
        self._events: dict[str, Event] = {}

    def tell(self, event: Event) -> None:
        self._events[event.name] = event

    def take(self) -> list[Event]:
        taken, self._events = list(self._events.values()), {}
        return taken


def run_here(job: Job, board: Any, cpus: int, retries: int) -> Outcome:
    """Run a job in the process that Ray calls this in."""
    spread = Portions(job, cpus, retries) if is_spread(job) else None
    keep_pages()
    with own_cores(0 if spread else cpus):
        load_kernels()
        forget_peak()
        outcome = run_job(job, _teller(board), spread)
        give_back()
    return outcome


def is_spread(job: Job) -> bool:
    """True for a job whose weights other processes write."""
    return job.row.shards > 1 and not job.calibrates


def _teller(board: Any) -> Any:
    """Pass events on to the board; those that come before the last one has arrived are not."""
    last: list[Any] = []
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            if not last or ray.wait(last, timeout=0)[0]:
                last[:] = [board.tell.remote(event)]

    return tell


@dataclass(frozen=True)
class Offer:
    """What every portion of one conversion needs. `fingerprint`: of the source, which each opens for itself."""

    model: str
    config: Any
    fingerprint: str
    plan: Plan
    calibration: Calibration | None
    scheme: Scheme | None
    memory: int
    cpus: int
    directory: Path
    identity: str
    version: str


class Portions:
    """Streams a row's weights in calls to the cluster: `bridge.portions.Spread`."""

    def __init__(self, job: Job, cpus: int, retries: int) -> None:
        self._job, self._cpus, self._retries = job, cpus, retries
        self.processes = job.row.shards

    def run(
        self, conversion: Conversion, portions: Sequence[Portion], stop: threading.Event
    ) -> Iterator[Mapping[str, Mapping[str, Any]]]:
        memory = FRESH + HEADERS + conversion.memory
        self._check_room(memory)
        offer, waiting = ray.put(self._offer(conversion)), deque(enumerate(portions))
        with closing(Calls(self._retries)) as calls:
            while (waiting or calls) and not stop.is_set():
                while waiting and len(calls) < self.processes:
                    number, portion = waiting.popleft()
                    calls.start(str(number), write_portion, offer, portion, num_cpus=self._cpus, memory=memory)
                for ended in calls.ended():
                    if ended.died:
                        raise WriteError(
                            f"{self._job.row.out}: a process that wrote a part of it died, {ended.attempts} times over "
                            f"({ended.error}); the kernel ends processes where memory runs out: give less `shards`"
                        )
                    if ended.error:
                        raise ended.error
                    yield ended.answer

    def _offer(self, conversion: Conversion) -> Offer:
        row, work = self._job.row, conversion.work
        return Offer(
            row.model, row.config, conversion.source.fingerprint, conversion.plan, conversion.calibration,
            conversion.scheme, conversion.memory, self._cpus, work.directory, work.identity, __version__,
        )  # fmt: skip

    def _check_room(self, memory: int) -> None:
        """Refuse what Ray would wait for without end: the row keeps its own memory while others write for it."""
        here = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        free = [n["Resources"].get("memory", 0) - (self._job.memory if n["NodeID"] == here else 0) for n in nodes]
        if max(free) < memory:
            raise UsageError(
                f"shards = {self.processes}: a part of the output takes {memory / 1e9:.2f} GB beside the row's own "
                f"{self._job.memory / 1e9:.2f} GB, and no node has them; leave `shards` out, or use larger nodes"
            )


def write_portion(offer: Offer, portion: Portion) -> Mapping[str, Mapping[str, Any]]:
    """Write a portion of a conversion that another process makes, in the process that Ray calls this in."""
    from bridge.stream import run_portion

    source = same_source(offer)
    keep_pages()
    with own_cores(offer.cpus):
        load_kernels()
        work = Work(offer.directory, portion.done, io.StringIO(), offer.identity)
        conversion = Conversion(offer.plan, source, offer.calibration, offer.scheme, offer.memory, work)
        told = run_portion(conversion, offer.directory, portion)
        give_back()
    return told


def same_source(offer: Offer) -> Source:
    """The row's model as this node sees it, refused where that is another one."""
    node, model = socket.gethostname(), told(offer.model)
    if offer.version != __version__:
        raise UsageError(
            f"{node} has qbridge {__version__}, the row's node {offer.version}: install one of them on all"
        )
    try:
        source = open_model(offer.model, offer.config, None)
    except BridgeError as error:
        raise SourceError(f"{model}: cannot be opened on {node}, as it was on the row's node: {error}") from error
    if source.fingerprint != offer.fingerprint:
        raise SourceError(f"{model} is another model on {node}: it must lie on a file system that all nodes share")
    return source


@contextmanager
def own_cores(count: int) -> Iterator[None]:
    """Run on `count` cores that no other process of ours has, as far as there are such; 0 for all.

    Ray counts CPUs and does not give them out, so that each process would start as many threads as the node has cores,
    with buffers for each.
    """
    threads = os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: one thread, which the affinity says better
    every, free = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [], list[int]()
    with ExitStack() as held:
        if threads is not None:
            held.callback(os.environ.__setitem__, "OMP_NUM_THREADS", threads)
        for core in every:
            if len(free) < count and _locked(core, held):
                free.append(core)
        others = [core for core in every if core not in free]
        use_cores((*free, *others)[: count or None])
        try:
            yield
        finally:
            use_cores(tuple(every))


def _locked(core: int, held: ExitStack) -> bool:
    """Bind a name that the kernel gives to one process at a time: no file, and none is left."""
    lock = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        lock.bind(f"\0qbridge/{os.getuid()}/{core}")
    except OSError:
        return False
    return True
