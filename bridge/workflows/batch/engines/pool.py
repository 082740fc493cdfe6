"""The parent's side of worker processes: starts, tells, listens and ends them; must never leave one behind."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from bridge.batches.job import CRASH, failure, overdue
from bridge.batches.values import FAILED, Event, Job, Outcome
from bridge.batches.worker import Ended, Order

KEEPS = 2 << 30  # bytes that a worker may keep between jobs: torch, transformers and ModelOpt take 0.9 GB
PATIENCE = 30.0  # seconds that a worker gets to clean up before it is killed
LONGEST = 3600.0  # seconds of one wait: the system takes no more than some weeks
LOOKS = 50  # for processes that a worker started, with 0, 1, 2 ... ms between them
STILL = b"TtZX"  # states of processes that start no others: stopped, or ended
MOST = 10_000  # messages that are taken from a worker which is late, before it is
LINES = 10  # of what a dead worker said
MODULES = "Extension modules: "  # how faulthandler begins a line of some hundred names


class Worker:
    """A process, idle or with a job. It may use `cores`; `charge` is what it is counted with while it runs."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)  # where the process cannot be started
            # it looks for packages where we do: a script may have changed sys.path
            paths = f"import sys; sys.path[:] = {sys.path!r}"
            program = f"{paths}; from bridge.batches.worker import main; main({theirs.fileno()})"
            self.said = undo.enter_context(tempfile.TemporaryFile())
            with _no_interrupts():
                self.process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self.said,
                    pass_fds=[theirs.fileno()],
                )
            undo.pop_all()  # `close` closes them
            self.connection = Connection(ours.detach())
        self.job: Job | None = None
        self.cores: tuple[int, ...] = ()
        self.charge = self.resident = 0
        self.since = 0.0

    def start(self, job: Job, cores: tuple[int, ...]) -> None:
        """Give an idle worker a job; what it keeps of earlier ones comes on top of what the job takes."""
        self.job, self.cores, self.since = job, cores, time.perf_counter()
        self.charge = job.memory + self.resident
        with contextlib.suppress(OSError):  # it died while it idled: told by its end of the connection
            self.connection.send(Order(job, cores))

    def receive(self) -> Event | Outcome:
        """The next thing that it tells; of a worker that died, that."""
        assert self.job
        try:
            told = self.connection.recv()
        except (EOFError, OSError):
            self.process.wait()
            return self._died(self.job)
        if isinstance(told, Ended):
            self.job, self.cores, self.resident = None, (), told.resident
            return told.outcome
        assert isinstance(told, Event)
        return told

    def _died(self, job: Job) -> Outcome:
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()
        lines = [line for line in lines if line and not line.startswith(MODULES)][-LINES:]
        code = self.process.returncode
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with {code}"
        hint = "the kernel does that where memory runs out: run fewer workers" if code == -signal.SIGKILL else ""
        text = f"the worker {how} in the middle" + (f"; {hint}" if hint else "")
        text += "; run the batch again: the row goes on from where it was"
        seconds = round(time.perf_counter() - self.since, 3)
        return Outcome(job.name, FAILED, "\n".join([text, *lines]), CRASH, seconds)

    @property
    def left(self) -> float:
        """Seconds until its job is overdue."""
        if self.job is None or self.job.timeout is None:
            return math.inf
        return self.job.timeout - (time.perf_counter() - self.since)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        for pid in _stopped(self.process.pid) if self.alive else ():
            _signal(pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Forget a process that has ended."""
        self.connection.close()
        self.said.close()


def _stopped(pid: int) -> list[int]:
    """A process and all that it started, stopped: who is starts no more, so a look that finds all stopped finds all."""
    for turn in range(LOOKS):
        family = _family(pid)
        running = [one for one, state in family.items() if state not in STILL]
        if not running:
            break
        for one in running:
            _signal(one, signal.SIGSTOP)
        time.sleep(turn / 1000)
    return list(family)


def _family(pid: int) -> dict[int, bytes]:
    """The states of a process, those that it started, and those that these did, as far as the system tells."""
    children, states = dict[int, list[int]](), dict[int, bytes]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            state, parent = stat.read_bytes().rpartition(b")")[2].split()[:2]
            states[int(stat.parent.name)] = state
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return {one: states.get(one, b"") for one in found}


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """What is started here gets no Ctrl-C, not even before its Python can refuse one: the parent decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Pool:
    """The workers there are. One is started when a job has none, and kept for the next job."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    @property
    def busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.job]

    @property
    def idle(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.job]

    def start(self, job: Job, cores: tuple[int, ...]) -> Outcome | None:
        """Start a job in a worker that idles, or in a new one; where none can be started, that is the job's outcome."""
        ready = [worker for worker in self.idle if worker.alive]
        if not ready:
            try:
                ready = [Worker()]
            except (OSError, MemoryError) as error:
                failed = failure(job.name, error)
                return replace(failed, error=f"its worker cannot be started: {failed.error}")
            self._workers += ready
        ready[0].start(job, cores)
        return None

    def told(self) -> Iterator[Event | Outcome]:
        """Wait until a worker has something to tell, and yield it; so of one that is stopped, its job being overdue."""
        by_connection = {worker.connection: worker for worker in self.busy}
        left = min((worker.left for worker in self.busy), default=math.inf)
        for connection in wait(list(by_connection), min(max(left, 0), LONGEST)):
            worker = by_connection[connection]  # type: ignore[index]
            yield self._receive(worker)
        for worker in self.busy:
            if worker.left <= 0:
                yield from self._late(worker)

    def _receive(self, worker: Worker) -> Event | Outcome:
        told = worker.receive()
        if isinstance(told, Outcome) and (worker.job or told.kind == CRASH or worker.resident > KEEPS):
            self._end([worker], bool(worker.job))
        return told

    def _late(self, worker: Worker) -> list[Event | Outcome]:
        """What a worker told while nobody looked; it is stopped unless its job has ended with that."""
        assert worker.job
        job, told = worker.job, list[Event | Outcome]()
        while len(told) < MOST and worker.connection.poll():
            told.append(self._receive(worker))
            if isinstance(told[-1], Outcome):
                return told
        worker.kill()
        worker.close()
        self._workers.remove(worker)
        return [*told, overdue(job, time.perf_counter() - worker.since)]

    def end_idle(self) -> None:
        """Give the memory of idle workers back."""
        self._end(self.idle)

    def close(self) -> None:
        """End all: those that work clean up first."""
        self._end(list(self._workers), stop=True)

    def _end(self, workers: Sequence[Worker], stop: bool = False) -> None:
        for worker in workers:
            with contextlib.suppress(OSError):
                if worker.job and stop:
                    worker.process.terminate()
                else:
                    worker.connection.send(None)
        until = time.monotonic() + PATIENCE
        for worker in workers:
            try:
                worker.process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                worker.kill()
            worker.close()
            self._workers.remove(worker)
