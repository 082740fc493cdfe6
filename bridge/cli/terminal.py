"""The terminal's side of a verb: progress bars, one message per error, exit codes, signals; must never know a verb.

Frameworks talk on both streams while they load. During a verb their words go to a buffer: `--debug` shows them as they
come, and an error that is not ours is shown with the last of them, so that nothing real is hidden.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from bridge.errors import BridgeError, disk_is_full
from bridge.progress import BYTES

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from bridge.progress import Progress as Callback

FAILED, USAGE, BELOW = 1, 2, 3  # exit codes of README, "Exit codes"; errors bring their own
# Read by the frameworks when they are imported; they change what is printed, never a result.
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


class Stopped(BaseException):
    """Ctrl-C or SIGTERM: unwinds like an interrupt, so that whoever holds a half-written thing removes it."""

    def __init__(self, number: int) -> None:
        self.number = number


class Exit(SystemExit):
    """Ends the command with this exit code; everything is said already."""


@dataclass(frozen=True)
class Terminal:
    """Where a verb prints: `out` for what was asked for, `progress` for how far it is, `err` for what lacks."""

    out: Console
    progress: Callback
    err: TextIO = field(default_factory=lambda: sys.stderr)

    def print(self, *what: Any) -> None:
        """Print renderables to stdout, every line whole: rich would crop those that are wider than the terminal.

        The bars end: they would go on where the cursor is, and wipe what is printed.
        """
        self._end_bars()
        for item in what:
            self.out.print(item, crop=False, soft_wrap=isinstance(item, str))

    def note(self, text: str) -> None:
        """Print a line to stderr, whatever the verb is told of what to print."""
        self._end_bars()
        print(f"note: {text}", file=self.err, flush=True)

    def _end_bars(self) -> None:
        if isinstance(self.progress, _Bars):
            self.progress.bars.stop()


@contextmanager
def session(*, debug: bool = False, quiet: bool = False) -> Iterator[Terminal]:
    """Run a verb: bars on stderr, every failure as one message there and as the exit code."""
    out, err = sys.stdout, sys.stderr
    chatter: TextIO = err if debug else io.StringIO()
    problem = ""
    code = 0
    try:
        with _signals(), _hushed(chatter, debug), _bars(err, quiet) as progress:
            yield Terminal(console(out), progress, err)
    except BridgeError as error:
        if debug:
            traceback.print_exc(file=err)
        problem, code = f"{type(error).__name__}: {error}", error.exit_code
    except (KeyboardInterrupt, Stopped) as stop:
        problem, code = _stopped(stop)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 -- or the interpreter complains when it flushes at exit
        code = FAILED
    except MemoryError:
        problem, code = (
            "out of memory; --memory bounds the stream, `qbridge plan` shows what a conversion needs",
            FAILED,
        )
    except Exception as error:
        problem, code = _unforeseen(error, chatter, debug), FAILED
    if problem:
        print(problem, file=err, flush=True)
    if code:
        raise Exit(code)


@contextmanager
def guarded() -> Iterator[None]:
    """Let a signal that comes before or after a verb end the command as one that comes during it."""
    try:
        with _signals():
            yield
    except Stopped as stop:
        problem, code = _stopped(stop)
        print(problem, file=sys.stderr, flush=True)
        raise Exit(code) from None


def open_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr (`>&-`) what they lead to elsewhere: nothing.

    The next file to be opened would take their place, and get what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 -- for as long as the process lives


def _stopped(stop: BaseException) -> tuple[str, int]:
    """What is said of a signal, and the exit code; nothing more is said of what libraries had begun."""
    warnings.simplefilter("ignore")
    number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
    left = "; ".join(getattr(stop, "__notes__", ())) or "nothing half-written is left"
    return f"stopped by {signal.Signals(number).name}; {left}", 128 + number


def console(stream: TextIO) -> Console:
    """A console on `stream`: a terminal's own width; in a pipe or file as wide as the content."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the process through stdout, which is redirected while a verb runs

    width = None if stream.isatty() else 1000
    return Plain(file=stream, width=width, highlight=False, markup=False, emoji=False)


def _unforeseen(error: Exception, chatter: TextIO, debug: bool) -> str:
    if debug:
        return traceback.format_exc()
    if isinstance(error, OSError) and disk_is_full(error):
        where = error.filename or "the output"
        return f"WriteError: {where}: the disk is full; nothing half-written is kept. Free some and run again"
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.filename or 'a file'}: {error.strerror}"
    said = chatter.getvalue().strip().splitlines()[-10:] if isinstance(chatter, io.StringIO) else []
    lines = [f"unforeseen {type(error).__name__}: {error}", "this is a bug, ours or below us; --debug shows where"]
    return "\n  ".join(lines + [f"before it: {line}" for line in said])


@contextmanager
def _signals() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Stopped`; the next ones cannot disturb the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for name in before:
            signal.signal(name, signal.SIG_IGN)
        raise Stopped(number)

    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    for name in before:
        signal.signal(name, stop)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def _hushed(chatter: TextIO, debug: bool) -> Iterator[None]:
    """Send what libraries print, warn and log to `chatter`."""
    if not debug:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(chatter))
        stack.enter_context(contextlib.redirect_stderr(chatter))
        if not debug:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
        yield


@contextmanager
def _bars(err: TextIO, quiet: bool) -> Iterator[Callback]:
    from bridge.progress import quiet as silence

    if quiet or not err.isatty():
        yield silence
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(err), transient=True, redirect_stdout=False, redirect_stderr=False) as bars:
        yield _Bars(bars)


class _Bars:
    """One bar a text. Called from several threads at once: the graph is made while the weights stream."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.tasks: dict[str, TaskID] = {}
        self.endless: str | None = None
        self.lock = threading.Lock()

    def __call__(self, done: int, total: int, text: str) -> None:
        with self.lock:
            if text not in self.tasks:
                self.tasks[text] = self.bars.add_task(text, total=total or None, rate="")
            if total:
                self.bars.update(self.tasks[text], completed=done, total=total, rate=self._rate(text, done))
            elif self.endless != text:  # work of unknown length ends when the next such work begins
                if self.endless is not None:
                    self.bars.update(self.tasks[self.endless], completed=1, total=1)
                self.endless = text

    def _rate(self, text: str, done: int) -> str:
        """Bytes a second, for what counts bytes."""
        elapsed = self.bars.tasks[self.tasks[text]].elapsed
        return f"{done / elapsed / 1e6:,.0f} MB/s" if text in BYTES and elapsed else ""


def load_kernels() -> None:
    """Call a kernel, so that numba fills its registries, without SciPy, whose BLAS no kernel calls: 0.1 s, not 0.35.

    Only the command line does so, in a process where nobody else compiles with numba.
    """
    blas = "scipy.linalg.cython_blas"
    hidden = blas not in sys.modules
    if hidden:
        sys.modules[blas] = None  # type: ignore[assignment]  # Python's way to say: cannot be imported
    try:
        import numpy as np

        from bridge.quant.bits import amax

        amax(np.zeros((1, 1), np.uint16), "bfloat16", 1, 1)
    finally:
        if hidden:
            del sys.modules[blas]


def keep_pages() -> None:
    """Let glibc reuse the memory of freed tensors in this process; elsewhere nothing happens.

    It would map and zero fresh pages for each of some hundred tensors: 11.6 against 6.7 s of system time for 1.1 B
    parameters. Only the command line does so: a library does not set its caller's allocator.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
