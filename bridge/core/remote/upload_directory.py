"""The hidden directory of an output before it is uploaded.

One run owns it at a time; the id in it tells the next run here that an interrupted upload is its own. It must never
stay if nothing in it is worth keeping.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bridge.core.errors import WriteError, reason
from bridge.core.output.journal import lock, remove_unbegun
from bridge.core.output.names import JOURNAL
from bridge.core.output.temporary import run_despite_signal


class Holding:
    """A directory that this run has locked; `run` is the id of the run, or of the killed one that left it here.

    `remembered`: something may lie elsewhere under that id.
    """

    def __init__(self, directory: Path, file: IO[str]) -> None:
        self.directory, self._file = directory, file
        file.seek(0)
        found = file.read().strip()
        self.run, self.remembered = found or os.urandom(16).hex(), bool(found)

    def remember(self) -> None:
        """Keep the id, by which a later run can resume what lies elsewhere."""
        if not self.remembered:  # writing it again could lose it
            self._file.write(self.run)
            self._file.flush()
        self.remembered = True

    def forget(self) -> None:
        """Nothing lies elsewhere under this id."""
        self._file.truncate(0)
        self.remembered = False


def read_holding(directory: Path) -> Holding:
    """Read the journal in `directory` without locking it; an empty one if there is none."""
    try:
        return Holding(directory, io.StringIO((directory / JOURNAL).read_text()))
    except (OSError, ValueError):  # none, or no text: `owning` reports it
        return Holding(directory, io.StringIO())


@contextmanager
def owning(directory: Path, where: str) -> Iterator[Holding]:
    """Own `directory` while the block runs, to make in it what goes to `where`; WriteError if another run does."""
    try:
        with _locked(directory, where) as file:
            yield Holding(directory, file)
    finally:
        with suppress(OSError):
            run_despite_signal(lambda: _remove_unused(directory))


def _remove_unused(directory: Path) -> None:
    """Remove the directory, unless something lies in it or the id is remembered."""
    if {path.name for path in directory.iterdir()} <= {JOURNAL}:
        remove_unbegun(directory)


def _locked(directory: Path, where: str) -> IO[str]:
    """The journal of `directory`, made if there is none."""
    try:
        directory.mkdir(exist_ok=True)
        if not (directory / JOURNAL).exists() and (others := sorted(path.name for path in directory.iterdir())):
            raise WriteError(f"{directory} holds {', '.join(others[:3])}: not ours; move it away first")
        file = (directory / JOURNAL).open("a+")
    except OSError as error:
        raise WriteError(f"{directory}: {reason(error)}; what goes to {where} is made there first") from error
    try:
        lock(file, directory)
    except BaseException as error:
        file.close()
        if not isinstance(error, WriteError):  # a signal
            raise
        raise WriteError(
            f"{where} is being made and sent by another run, in {directory}; wait for it, or choose another output"
        ) from error
    return file
