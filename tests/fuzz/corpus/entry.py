"""One artefact that somebody made to do harm: its files, what reads them, and that nothing may come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def always(files: Mapping[str, bytes]) -> Callable[[Path], Mapping[str, bytes]]:
    """Files that name no canary, and are the same wherever it lies."""
    return lambda canary: files


@dataclass(frozen=True)
class Entry:
    """`files` are given the path of a canary, which running them would make. `read`: by bridge, the folder given.

    `refused`: whether reading must be refused; where it need not be, it must only do no harm.
    """

    name: str
    files: Callable[[Path], Mapping[str, bytes]]
    read: Callable[[Path], Any]
    refused: bool = True
