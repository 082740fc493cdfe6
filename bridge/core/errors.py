"""The errors for users: one base class, and one class per stage.

A message says where, what, why and what to do, the user's row or call first. Raise before work begins; `assert`
is for our own mistakes only.
"""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

UNREACHED = ("gaierror", "ConnectError", "ConnectTimeout")  # of socket, and of the hub's client (httpx)
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
MAX_MESSAGE = 16_384  # characters of a message: names come from files, and one may be as long as its file


class BridgeError(Exception):
    """Base of all errors in the input; the command line returns `exit_code`.

    `reported_elsewhere`: another process of the same run prints it.
    """

    exit_code = 1
    reported_elsewhere = False

    def __str__(self) -> str:
        """Return the message for a terminal: names come from files and may have control characters."""
        text = super().__str__()
        shown = text[:MAX_MESSAGE]
        if not shown.isprintable():
            shown = printable(shown)[:MAX_MESSAGE]
        return shown if len(text) <= MAX_MESSAGE else f"{shown} ... and {len(text) - MAX_MESSAGE} more characters"


def first_line(error: BaseException) -> str:
    """The first line of another library's error, whose messages may run to pages; its class if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def printable(text: str) -> str:
    """A text for a terminal: escapes instead of control characters, except for line ends.

    >>> printable("a\\x1b[2J\\n")
    'a\\\\x1b[2J\\n'
    """
    return "".join(
        mark if mark.isprintable() or mark == "\n" else mark.encode("unicode_escape").decode() for mark in text
    )


class UsageError(BridgeError):
    """A wrong argument: unknown target, scheme, option or task."""

    exit_code = 2


class TableError(BridgeError):
    """A row, op or dimension in `mappings/` that is invalid."""


class SourceError(BridgeError):
    """A model that cannot be read: missing shard, truncated header, Git-LFS pointer, refused pickle."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` before the message of a SourceError raised inside, if it does not begin with it."""
    try:
        yield
    except SourceError as error:
        raise SourceError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error


@contextmanager
def collected(problems: list[str], where: str) -> Iterator[None]:
    """Append the message of a SourceError raised inside to `problems`, which are all of `where`."""
    try:
        yield
    except SourceError as error:
        problems.append(str(error).removeprefix(f"{where}/").removeprefix(f"{where}: "))


class SchemeError(BridgeError):
    """A scheme or recipe that is malformed, matches nothing, or is not supported by the target."""


class PlanError(BridgeError):
    """Source, tables, scheme and target do not fit together; raised before any weight is read."""


class CalibrationError(BridgeError):
    """Calibration data is missing, too short or not finite, or statistics that the scheme needs are absent."""


class TrainingError(BridgeError):
    """A training that cannot run, or that makes the model worse."""


class ExportError(BridgeError):
    """torch could not export the architecture's graph."""


class WriteError(BridgeError):
    """The output cannot be written: exists already, disk full, in use by another run."""


class VerifyError(BridgeError):
    """The written model cannot be read back or run."""


class InspectError(BridgeError):
    """A config of `inspect` that is wrong or does not fit the model; one error lists every mistake."""


class BatchError(BridgeError):
    """Rows of a batch that cannot run, reported before any of them starts."""


class GoldenError(BridgeError):
    """A damaged or invalid golden, or one that would change without a reason."""


class LiveError(BridgeError):
    """A model in training that changed since it was planned, or ranks of it that did not come in time or differ."""


class CannotRun(VerifyError):
    """This machine cannot run the model: no runtime, memory, kernels or data."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes; not its `__context__`: what was tried before is not the reason."""
    while error:
        yield error
        error = error.__cause__


def disk_is_full(error: BaseException) -> bool:
    """Whether the cause of an error is a disk, or a user's quota, that is full."""
    return any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in causes(error))


def is_unreachable(error: BaseException | None) -> bool:
    """True if the cause of an error is a server that cannot be reached: no host, no route, refused, or no answer.

    >>> is_unreachable(TimeoutError()), is_unreachable(FileNotFoundError())
    (True, False)
    """
    for one in causes(error):
        if isinstance(one, ConnectionRefusedError | TimeoutError) or type(one).__name__ in UNREACHED:
            return True
        if isinstance(one, OSError) and one.errno in UNREACHABLE:
            return True
    return False


def notes_of(error: BaseException) -> list[str]:
    """The notes of an error: where the finished part of the work is."""
    return list(getattr(error, "__notes__", ()))


def drop_notes(error: BaseException, place: object) -> None:
    """Remove the notes on work in a directory that is removed with the error."""
    error.__notes__ = [note for note in notes_of(error) if str(place) not in note]


def reason(error: OSError) -> str:
    """Return the system's reason; a full disk and a full quota have the same.

    >>> reason(OSError(errno.EDQUOT, "Disk quota exceeded"))
    'the disk is full'
    """
    return "the disk is full" if disk_is_full(error) else error.strerror or str(error)


class BridgeWarning(UserWarning):
    """A warning before work begins; the command line prints it on stderr."""


def warn(text: str) -> None:
    """Warn of something, at the line outside of this package that led to it."""
    frame, depth = sys._getframe(), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, BridgeWarning, stacklevel=depth)


class Stopped(BaseException):
    """Ctrl-C or SIGTERM: unwinds like an interrupt, so that work is kept or removed on the way."""

    def __init__(self, number: int) -> None:
        self.number = number
