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


class CannotRun(VerifyError):
    """Nothing is wrong with the model, but this machine cannot run it: no runtime, memory, kernels or data."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "known: a, b, c; nearest: b" for an error about an unknown `name`."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"known: {', '.join(names)}" + (f"; nearest: {close[0]}" if close else "")


def fold_layers(names: Iterable[str]) -> list[str]:
    """Fold names that differ in one integer component: `layers.0.q, layers.1.q` becomes `layers.{0..1}.q`.

    >>> fold_layers(["layers.0.q", "layers.1.q", "norm"])
    ['layers.{0..1}.q', 'norm']
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    order: list[tuple[str, ...]] = []
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        key = tuple(parts) if at is None else (*parts[:at], "{}", *parts[at + 1 :])
        if key not in groups:
            groups[key] = []
            order.append(key)
        if at is not None:
            groups[key].append(int(parts[at]))
    return [".".join(key).replace("{}", _ranges(sorted(set(groups[key]))), 1) for key in order]


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    text = ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return text if len(numbers) == 1 else "{" + text + "}"
