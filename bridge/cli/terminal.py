"""A verb's terminal: progress bars, one message per error, exit codes, signals.

Frameworks print on both streams while they load. During a verb their output goes to a buffer: `--debug` shows it at
once, and an unexpected error is shown with the last lines of it, so that nothing important is hidden.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from bridge.cli.flags import in_flags
from bridge.core.errors import BridgeError, BridgeWarning, Stopped, disk_is_full, notes_of, printable
from bridge.core.progress import Progress, no_progress
from bridge.core.progress_bar import Bars, LogLines, bars, console

if TYPE_CHECKING:
    from rich.console import Console

FAILED, BELOW = 1, 3  # exit codes of the documentation; an error has its own
# The frameworks read these when they are imported; they change what is printed, never a result.
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


class Exit(SystemExit):
    """Ends the command with this exit code, without a message."""


@dataclass(frozen=True)
class Terminal:
    """Where a verb prints: results to `out`, progress to `progress`, notes to `err`."""

    out: Console
    progress: Progress
    err: TextIO = field(default_factory=lambda: sys.stderr)
    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def print(self, *what: Any) -> None:
        """Print renderables to stdout, every line whole: rich would crop lines wider than the terminal.

        The bars stop: they would continue at the cursor and erase what is printed.
        """
        self._end_bars()
        for item in what:
            self.out.print(item, crop=False, soft_wrap=isinstance(item, str))

    def write(self, text: str) -> None:
        """Print a piece of a line to stdout at once. A model may generate control characters: they are escaped."""
        self._end_bars()
        self.out.file.write(printable(text))
        self.out.file.flush()

    def print_json(self, data: Any) -> None:
        import json

        self.print(json.dumps(data, indent=2, default=str))

    def show(self, json: Callable[[], str], *tables: Any) -> None:
        """Print a result as JSON or as tables, or nothing with --quiet."""
        if self.json:
            self.print(json())
        elif not self.quiet:
            self.print(*tables)

    def finish(self, result: Any, table: Any, code: int = BELOW) -> None:
        """Print a result, and exit with `code` unless it passed."""
        self.show(result.to_json, table)
        if not result.passed:
            raise Exit(code)

    def note(self, text: str) -> None:
        """Print a line to stderr, also with --quiet and --json."""
        self._end_bars()
        print(f"note: {text}", file=self.err, flush=True)

    def _end_bars(self) -> None:
        if isinstance(self.progress, Bars):
            self.progress.bars.stop()


@contextmanager
def session(*, debug: bool = False, quiet: bool = False, silent: bool = False) -> Iterator[Terminal]:
    """Run a verb: progress bars on stderr; a failure is one message there, and the exit code.

    `silent`: another process of the same run prints the results.
    """
    out, err = sys.stdout, sys.stderr
    log: TextIO = err if debug else io.StringIO()
    problem = ""
    code = 0
    try:
        with _signals(), _redirected(log, debug), _bars(err, quiet or silent) as progress:
            if not debug:
                warnings.showwarning = partial(_show_warning, err, progress)
            yield Terminal(console(io.StringIO() if silent else out), progress, err)
    except BridgeError as error:
        if debug:
            traceback.print_exc(file=err)
        if not error.reported_elsewhere:
            problem = in_flags("\n  ".join([f"{type(error).__name__}: {error}", *notes_of(error)]))
        code = error.exit_code
    except (KeyboardInterrupt, Stopped) as stop:
        problem, code = _stopped(stop)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 -- else flushing at exit fails with a message
        code = FAILED
    except MemoryError as error:
        text = "out of memory; --memory limits the stream, `qbridge plan` shows what a conversion needs"
        problem, code = "\n  ".join([text, *notes_of(error)]), FAILED
    except Exception as error:
        problem, code = _unexpected(error, log, debug), FAILED
    if problem:
        print(problem, file=err, flush=True)
    if code:
        raise Exit(code)


@contextmanager
def guarded() -> Iterator[None]:
    """Let a signal before or after a verb end the command like one during the verb."""
    try:
        with _signals():
            yield
    except Stopped as stop:
        problem, code = _stopped(stop)
        print(problem, file=sys.stderr, flush=True)
        raise Exit(code) from None


def open_streams() -> None:
    """Open /dev/null for a stdin, stdout or stderr that the process was started without (`>&-`).

    Else the next opened file would take its descriptor and receive what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 -- open until the process ends


def _stopped(stop: BaseException) -> tuple[str, int]:
    """The message of a signal, and the exit code."""
    warnings.simplefilter("ignore")  # of libraries that were interrupted
    number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
    left = "; ".join(notes_of(stop)) or "nothing half-written is left"
    return f"stopped by {signal.Signals(number).name}; {left}", 128 + number


def _show_warning(err: TextIO, progress: Progress, message: Warning | str, *_: Any) -> None:
    """Print one of our warnings above the bars, if there are any."""
    if isinstance(progress, Bars):
        progress.bars.console.print(f"warning: {in_flags(str(message))}")
    else:
        print(f"warning: {in_flags(str(message))}", file=err, flush=True)


def _unexpected(error: Exception, log: TextIO, debug: bool) -> str:
    if debug:
        return traceback.format_exc()
    if isinstance(error, OSError) and disk_is_full(error):
        text = f"WriteError: {error.filename or 'the output'}: the disk is full. Free some space and run again"
        return "\n  ".join([text, *notes_of(error)])
    if isinstance(error, OSError) and error.strerror:
        text = f"{type(error).__name__}: {error.filename or 'a file'}: {error.strerror}"
        return "\n  ".join([text, *notes_of(error)])
    printed = log.getvalue().strip().splitlines()[-10:] if isinstance(log, io.StringIO) else []
    lines = [
        f"unexpected {type(error).__name__}: {error}",
        "this is a bug in qbridge or in a library it calls; --debug shows where",
    ]
    return "\n  ".join([*lines, *notes_of(error), *(f"printed before it: {line}" for line in printed)])


@contextmanager
def _signals() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Stopped`; later ones are ignored during cleanup."""
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
def _redirected(log: TextIO, debug: bool) -> Iterator[None]:
    """Send what libraries print, warn and log to `log`; of warnings only ours are shown."""
    if not debug:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
    with redirect_stdout(log), redirect_stderr(log), ExitStack() as stack:
        if not debug:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", BridgeWarning)
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
        yield


def _bars(err: TextIO, quiet: bool) -> AbstractContextManager[Progress]:
    if quiet:
        return nullcontext(no_progress)
    return bars(err) if err.isatty() else nullcontext(LogLines(err.write))
