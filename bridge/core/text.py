"""Every error a user can meet: one base class, one class per stage, one shape of message.

A message says where, what, why and what to do, the user's row or call first. Raise before work begins; `assert`
is for our own mistakes only.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Sequence

LONGEST = 16_384  # characters of a message: names come from files, and one may be as long as its file
NAMED = 100  # characters of a name that are compared with others: difflib takes their product
COMPONENTS = 32  # of a name that is folded; each is a pass over all names


class BridgeError(Exception):
    """Base of all errors that are the input's fault; `exit_code` is what the command line returns."""

    exit_code = 1

    def __str__(self) -> str:
        """The message, fit for a terminal: names in it come from files, and may hold what steers one."""
        text = super().__str__()
        shown = text[:LONGEST]
        if not shown.isprintable():
            shown = "".join(map(_shown, shown))[:LONGEST]
        return shown if len(text) <= LONGEST else f"{shown} ... and {len(text) - LONGEST} more characters"


def _shown(mark: str) -> str:
    return mark if mark.isprintable() or mark == "\n" else mark.encode("unicode_escape").decode()


class UsageError(BridgeError):
    """A wrong argument: unknown target, scheme, option or task."""

    exit_code = 2


class TableError(BridgeError):
    """A row, op or dimension in `mappings/` that does not hold together."""


class SourceError(BridgeError):
    """A model that cannot be read as it stands: missing shard, truncated header, Git-LFS pointer, refused pickle."""


class SchemeError(BridgeError):
    """A scheme or recipe that is malformed, matches nothing, or that the target cannot express."""


class PlanError(BridgeError):
    """Source, tables, scheme and target do not fit together; raised before any weight is read."""


class CalibrationError(BridgeError):
    """Calibration data is missing, too short or not finite, or statistics that the scheme needs are absent."""


class ExportError(BridgeError):
    """torch could not export the architecture's graph."""


class WriteError(BridgeError):
    """The output cannot be written: exists already, disk full, in use by another run."""


class VerifyError(BridgeError):
    """The written model cannot be read back or run."""


class BatchError(BridgeError):
    """Rows of a batch that cannot run, together or one of them, told before any of them is started."""


class GoldenError(BridgeError):
    """A golden that is damaged or not one, or that would change without a reason."""


class CannotRun(VerifyError):
    """Nothing is wrong with the model, but this machine cannot run it: no runtime, memory, kernels or data."""


def disk_is_full(error: OSError) -> bool:
    """True where the disk takes no more, or not of this user."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def reason(error: OSError) -> str:
    """Why the system refused, of a full disk in one way everywhere.

    >>> reason(OSError(errno.EDQUOT, "Disk quota exceeded"))
    'the disk is full'
    """
    return "the disk is full" if disk_is_full(error) else error.strerror or str(error)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "known: a, b, c; nearest: b" for an error about an unknown `name`."""
    names = sorted(known)
    short = [known for known in names if len(known) <= NAMED]
    close = difflib.get_close_matches(name[:NAMED], short, n=1, cutoff=0.5)
    return f"known: {', '.join(names)}" + (f"; nearest: {close[0]}" if close else "")


def number(count: int, word: str) -> str:
    """A count of things by their name.

    >>> number(1, "row"), number(2, "row")
    ('1 row', '2 rows')
    """
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def first_of(names: Sequence[str], most: int) -> str:
    """The first of many names, and how many more there are.

    >>> first_of(["a", "b", "c"], 2), first_of(["a", "b"], 2)
    ('a, b and 1 more', 'a, b')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def fold_layers(names: Iterable[str]) -> list[str]:
    """Fold names that differ in one integer component, then in the next: layers, and the experts inside them.

    >>> fold_layers(["layers.0.q", "layers.1.q", "norm"])
    ['layers.{0..1}.q', 'norm']
    >>> fold_layers(f"layers.{layer}.experts.{expert}.up" for layer in (0, 1) for expert in (0, 2, 3))
    ['layers.{0..1}.experts.{0,2..3}.up']
    """
    folded = [tuple(name.split(".")) for name in names]
    for at in range(min(COMPONENTS, max(map(len, folded), default=0))):
        groups: dict[tuple[str, ...], list[int]] = {}
        for parts in folded:
            # no more digits than a count of layers has, and none of another script, which `int` may not take
            if at < len(parts) and len(parts[at]) < 10 and parts[at].isascii() and parts[at].isdecimal():
                groups.setdefault((*parts[:at], "{}", *parts[at + 1 :]), []).append(int(parts[at]))
            else:
                groups.setdefault(parts, [])
        folded = [
            (*key[:at], _ranges(sorted(set(found))), *key[at + 1 :]) if found else key for key, found in groups.items()
        ]
    return [".".join(parts) for parts in folded]


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    text = ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return text if len(numbers) == 1 else "{" + text + "}"


def fold_problems(problems: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each different text, after the names that it holds for, layers folded; "" is no name.

    >>> fold_problems([("h.0.q", "is missing"), ("h.1.q", "is missing")])
    ['h.{0..1}.q: is missing']
    """
    by_text: dict[str, list[str]] = {}
    for name, text in problems:
        by_text.setdefault(text, []).extend([name] if name else [])
    return [f"{', '.join(fold_layers(names))}: {text}" if names else text for text, names in by_text.items()]
