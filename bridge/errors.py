"""Every error a user can meet: one base class, one class per stage, one shape of message.

A message says where, what, why and what to do, the user's row or call first. Raise before work begins; `assert`
is for our own mistakes only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BridgeError(Exception):
    """Base of all errors that are the input's fault; `exit_code` is what the command line returns."""

    exit_code = 1


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


class GoldenError(BridgeError):
    """A golden that is damaged or not one, or that would change without a reason."""


class CannotRun(VerifyError):
    """Nothing is wrong with the model, but this machine cannot run it: no runtime, memory, kernels or data."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "known: a, b, c; nearest: b" for an error about an unknown `name`."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"known: {', '.join(names)}" + (f"; nearest: {close[0]}" if close else "")


def fold_layers(names: Iterable[str]) -> list[str]:
    """Fold names that differ in one integer component, then in the next: layers, and the experts inside them.

    >>> fold_layers(["layers.0.q", "layers.1.q", "norm"])
    ['layers.{0..1}.q', 'norm']
    >>> fold_layers(f"layers.{layer}.experts.{expert}.up" for layer in (0, 1) for expert in (0, 2, 3))
    ['layers.{0..1}.experts.{0,2..3}.up']
    """
    folded = [tuple(name.split(".")) for name in names]
    for at in range(max(map(len, folded), default=0)):
        groups: dict[tuple[str, ...], list[int]] = {}
        for parts in folded:
            if at < len(parts) and parts[at].isdigit():
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
