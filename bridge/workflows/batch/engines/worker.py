"""A process that runs jobs for the local engine, one after another; must never outlive the process that started it.

It is a fresh interpreter, not a fork (torch and numba hold threads, which a fork would lose), and not started through
`multiprocessing`, which would run the caller's script again. One worker runs many jobs: importing torch and ModelOpt
costs seconds, more than a small row. What a job leaves in memory is given back after it, and told to the parent, which
ends a worker that keeps too much.
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

from bridge.batches.job import run_job
from bridge.batches.values import Event, Job, Outcome

EVERY = 0.1  # seconds between two events of one stage


@dataclass(frozen=True)
class Order:
    """What the parent sends: a job, and the cores that it may use."""

    job: Job
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """What the parent gets back: how the job ended, and the bytes that the process keeps."""

    outcome: Outcome
    resident: int


class Parent:
    """The way back; any thread may tell."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._last: tuple[str, float] = ("", 0.0)

    def tell(self, event: Event) -> None:
        """Pass on an event, unless one of its stage went out a moment ago; the last of a stage always goes."""
        now = time.monotonic()
        with self._lock:
            stage, at = self._last
            if event.stage == stage and now - at < EVERY and not 0 < event.total <= event.done:
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
    """Run orders from the connection `fd` until it says None; die when it closes without a word."""
    from bridge.terminal import Stopped, keep_pages, load_kernels

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not disturb the cleaning up
        raise Stopped(number)

    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent decides
    signal.signal(signal.SIGTERM, stop)
    keep_pages()
    connection = Connection(fd)
    parent, orders = Parent(connection), queue.SimpleQueue[Order | None]()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    try:
        load_kernels()
        while (order := orders.get()) is not None:
            use_cores(order.cores)
            forget_peak()
            outcome = run_job(order.job, parent.tell)
            give_back()
            gc.freeze()  # what is left are imports, a million objects with ModelOpt: the next collection is short
            parent.end(outcome)
    except Stopped as stopped:
        raise SystemExit(128 + stopped.number) from None


def _listen(connection: Connection, orders: queue.SimpleQueue[Order | None]) -> None:
    """Queue what comes; where the parent is gone, end at once."""
    try:
        while (order := connection.recv()) is not None:
            orders.put(order)
    except (EOFError, OSError):
        die()
    orders.put(None)


def die() -> None:
    """End as the parent did, without cleaning up: an error would make `convert` remove what the next run resumes."""
    os.kill(os.getpid(), signal.SIGKILL)


def use_cores(cores: tuple[int, ...]) -> None:
    """Run on these cores from now on: threads that are there move, and torch makes as many as there are cores."""
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                os.sched_setaffinity(int(thread.name), cores)
    torch = sys.modules.get("torch")
    if cores and torch is not None:
        torch.set_num_threads(len(cores))


def forget_peak() -> None:
    """Let the peak of memory begin anew, so that a report tells of its own row."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def give_back() -> None:
    """Return freed memory to the system: other workers count on it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of this process in memory, 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
