"""A worker process of the local engine; dies with its parent.

It is a new interpreter, not a fork (torch has threads, which a fork would lose), and not started by
`multiprocessing`, which would run the caller's script again. One worker runs many jobs: importing torch and ModelOpt
takes seconds, more than a small row. After each job it returns freed memory to the system and reports what it keeps to
the parent, which ends a worker that keeps too much.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bridge.core.errors import Stopped
from bridge.core.machine import keep_pages
from bridge.workflows.batch.job import run_job
from bridge.workflows.batch.values import Event, Job, Outcome

INTERVAL = 0.1  # seconds between two events of a stage
Order = tuple[Job, tuple[int, ...]]  # a message to the worker: a job, and the cores that it may use


@dataclass(frozen=True)
class Ended:
    """A message to the parent: how the job ended, and the bytes that the process keeps."""

    outcome: Outcome
    resident: int


class Parent:
    """The connection to the parent, for any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._last: tuple[str, float] = ("", 0.0)

    def report(self, event: Event) -> None:
        """Send an event, unless one of its stage was just sent; the last of a stage is always sent."""
        now = time.monotonic()
        with self._lock:
            stage, sent = self._last
            if event.stage == stage and now - sent < INTERVAL and not 0 < event.total <= event.done:
                return
            self._last = (event.stage, now)
            self._send(event)

    def end(self, outcome: Outcome) -> None:
        with self._lock:
            self._last = ("", 0.0)
            self._send(Ended(outcome, resident()))

    def _send(self, message: Event | Ended) -> None:
        try:
            self._connection.send(message)
        except OSError:
            die()


def main(fd: int) -> None:
    """Run orders from the connection `fd` until None comes; die if it closes before."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the cleanup
        raise Stopped(number)

    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to every process; the parent decides
    signal.signal(signal.SIGTERM, stop)
    keep_pages()
    connection = Connection(fd)
    parent, orders = Parent(connection), queue.SimpleQueue[Order | None]()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    try:
        while (order := orders.get()) is not None:
            job, cores = order
            use_cores(cores)
            forget_peak()
            outcome = run_job(job, parent.report)
            release_memory()
            gc.freeze()  # the remaining objects are imports, a million with ModelOpt: the next collection is short
            parent.end(outcome)
    except Stopped as stopped:
        raise SystemExit(128 + stopped.number) from None


def _listen(connection: Connection, orders: queue.SimpleQueue[Order | None]) -> None:
    """Queue the orders; die if the parent is gone."""
    try:
        while (order := connection.recv()) is not None:
            orders.put(order)
    except (EOFError, OSError):
        die()
    orders.put(None)


def die() -> None:
    """End without cleanup, like the parent: an error would make `convert` remove what the next run resumes."""
    os.kill(os.getpid(), signal.SIGKILL)


def use_cores(cores: tuple[int, ...]) -> None:
    """Run on these cores from now on: existing threads move, and torch gets one thread per core."""
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended
                os.sched_setaffinity(int(thread.name), cores)
    torch = sys.modules.get("torch")
    if cores and torch is not None:
        torch.set_num_threads(len(cores))


def forget_peak() -> None:
    """Reset the peak of memory, so that a report has that of its own row."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def release_memory() -> None:
    """Return freed memory to the system, for other workers."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of this process in memory, 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
