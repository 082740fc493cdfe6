"""The pool of worker processes: start, listen to and end them."""

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

from bridge.workflows.batch.engines.worker import Ended
from bridge.workflows.batch.job import CRASH, failure, overdue
from bridge.workflows.batch.values import FAILED, Event, Job, Outcome

MAX_RESIDENT = 2 << 30  # bytes that a worker may keep between jobs: torch, transformers and ModelOpt take 0.9 GB
CLEANUP = 30.0  # seconds that a worker gets to clean up before it is killed
MAX_WAIT = 3600.0  # seconds of one wait: the system accepts only a few weeks
MAX_SCANS = 50  # for processes that a worker started, with 0, 1, 2 ... ms between them
STOPPED = b"TtZX"  # states of processes that start no others: stopped, or ended
MAX_MESSAGES = 10_000  # that are read from an overdue worker before it is killed
MAX_LINES = 10  # of a dead worker's stderr
MODULES = "Extension modules: "  # begin of a line of faulthandler with hundreds of names


class Worker:
    """A process, idle or with a job. It may use `cores`; `charge`: its planned bytes while it runs."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)  # if the process cannot be started
            # the same sys.path: a script may have changed it
            paths = f"import sys; sys.path[:] = {sys.path!r}"
            program = f"{paths}; from bridge.workflows.batch.engines.worker import main; main({theirs.fileno()})"
            self.stderr = undo.enter_context(tempfile.TemporaryFile())
            with _no_interrupts():
                self.process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self.stderr,
                    pass_fds=[theirs.fileno()],
                )
            undo.pop_all()  # `close` closes them
            self.connection = Connection(ours.detach())
        self.job: Job | None = None
        self.cores: tuple[int, ...] = ()
        self.charge = self.resident = 0
        self.since = 0.0

    def start(self, job: Job, cores: tuple[int, ...]) -> None:
        """Give an idle worker a job; the memory that it keeps of earlier jobs comes on top of the job's."""
        self.job, self.cores, self.since = job, cores, time.perf_counter()
        self.charge = job.memory + self.resident
        with contextlib.suppress(OSError):  # it died while idle: `receive` finds the connection closed
            self.connection.send((job, cores))

    def receive(self) -> Event | Outcome:
        """Its next message; if it died, the outcome of its job."""
        assert self.job
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.process.wait()
            return self._died(self.job)
        if isinstance(message, Ended):
            self.job, self.cores, self.resident = None, (), message.resident
            return message.outcome
        assert isinstance(message, Event)
        return message

    def _died(self, job: Job) -> Outcome:
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        lines = [line for line in lines if line and not line.startswith(MODULES)][-MAX_LINES:]
        code = self.process.returncode
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with {code}"
        hint = "; the kernel does that if memory runs out: run fewer workers" if code == -signal.SIGKILL else ""
        text = f"the worker {how} during the job{hint}; run the batch again: the row resumes where it stopped"
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
        for pid in _stop_family(self.process.pid) if self.alive else ():
            _signal(pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Release the resources of an ended process."""
        self.connection.close()
        self.stderr.close()


def _stop_family(pid: int) -> list[int]:
    """Stop a process and its descendants. Stopped processes start no others: if all are stopped, none is missing."""
    for turn in range(MAX_SCANS):
        family = _family(pid)
        running = [one for one, state in family.items() if state not in STOPPED]
        if not running:
            break
        for one in running:
            _signal(one, signal.SIGSTOP)
        time.sleep(turn / 1000)
    return list(family)


def _family(pid: int) -> dict[int, bytes]:
    """The states of a process and its descendants, from /proc."""
    children, states = dict[int, list[int]](), dict[int, bytes]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            state, parent = stat.read_bytes().rpartition(b")")[2].split()[:2]
            states[int(stat.parent.name)] = state
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    family = [pid]
    for one in family:
        family += children.get(one, [])
    return {one: states.get(one, b"") for one in family}


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
    """A process that is started here gets no Ctrl-C, not even before its Python can ignore it: the parent decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Pool:
    """The workers. One is started for a job without an idle worker, and kept for later jobs."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    @property
    def busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.job]

    @property
    def idle(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.job]

    def start(self, job: Job, cores: tuple[int, ...]) -> Outcome | None:
        """Start a job in an idle worker or a new one; if none can be started, return the job's failure."""
        ready = [worker for worker in self.idle if worker.alive]
        if not ready:
            try:
                ready = [Worker()]
            except (OSError, MemoryError) as error:
                outcome = failure(job.name, error)
                return replace(outcome, error=f"its worker cannot be started: {outcome.error}")
            self._workers += ready
        ready[0].start(job, cores)
        return None

    def messages(self) -> Iterator[Event | Outcome]:
        """Wait for messages of workers and yield them; a worker with an overdue job is killed."""
        by_connection = {worker.connection: worker for worker in self.busy}
        left = min((worker.left for worker in self.busy), default=math.inf)
        for connection in wait(list(by_connection), min(max(left, 0), MAX_WAIT)):
            worker = by_connection[connection]  # type: ignore[index]
            yield self._receive(worker)
        for worker in self.busy:
            if worker.left <= 0:
                yield from self._overdue(worker)

    def _receive(self, worker: Worker) -> Event | Outcome:
        message = worker.receive()
        if isinstance(message, Outcome) and (worker.job or message.kind == CRASH or worker.resident > MAX_RESIDENT):
            self._end([worker], bool(worker.job))
        return message

    def _overdue(self, worker: Worker) -> list[Event | Outcome]:
        """The unread messages of an overdue worker; it is killed unless they contain its job's outcome."""
        assert worker.job
        job, messages = worker.job, list[Event | Outcome]()
        while len(messages) < MAX_MESSAGES and worker.connection.poll():
            messages.append(self._receive(worker))
            if isinstance(messages[-1], Outcome):
                return messages
        worker.kill()
        worker.close()
        self._workers.remove(worker)
        return [*messages, overdue(job, time.perf_counter() - worker.since)]

    def end_idle(self) -> None:
        """End idle workers, for their memory."""
        self._end(self.idle)

    def close(self) -> None:
        """End all workers; busy ones clean up first."""
        self._end(list(self._workers), stop=True)

    def _end(self, workers: Sequence[Worker], stop: bool = False) -> None:
        for worker in workers:
            with contextlib.suppress(OSError):
                if worker.job and stop:
                    worker.process.terminate()
                else:
                    worker.connection.send(None)
        until = time.monotonic() + CLEANUP
        for worker in workers:
            try:
                worker.process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                worker.kill()
            worker.close()
            self._workers.remove(worker)
