"""The hidden directory in which an output is made before it is sent: one run at a time, which knows itself again.

Must never be left where nothing in it is worth keeping.
"""

from __future__ import annotations

import io
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bridge.errors import WriteError, reason
from bridge.journal import JOURNAL, lock, remove_unbegun
from bridge.scratch import surely


class Holding:
    """A directory that this run has locked; `run` is the id of the run, or of the killed one that left it here.

    `remembered`: something may lie elsewhere under that id.
    """

    def __init__(self, directory: Path, file: IO[str]) -> None:
        self.directory, self._file = directory, file
        file.seek(0)
        found = file.read().strip()
        self.run, self.remembered = found or secrets.token_hex(16), bool(found)

    def remember(self) -> None:
        """Keep the id: what lies elsewhere under it can then be gone on with."""
        if not self.remembered:  # an id that is there is never taken away, not for the moment until it is written again
            self._file.write(self.run)
            self._file.flush()
        self.remembered = True

    def forget(self) -> None:
        """Nothing lies elsewhere under this id."""
        self._file.truncate(0)
        self.remembered = False

    def close(self) -> None:
        """Remove the directory, unless something lies in it or the id is remembered."""
        path = self.directory / JOURNAL
        if not path.stat().st_size and [*self.directory.iterdir()] == [path]:
            shutil.rmtree(self.directory)


def seen(directory: Path) -> Holding:
    """What lies in `directory`, or nothing, without owning it: whose run it is, to be asked and not to be changed."""
    try:
        return Holding(directory, io.StringIO((directory / JOURNAL).read_text()))
    except (OSError, ValueError):  # none, or no text: told where it is to be owned
        return Holding(directory, io.StringIO())


@contextmanager
def held(directory: Path, where: str) -> Iterator[Holding]:
    """Own `directory` while the block runs, to make in it what goes to `where`; WriteError where another run does."""
    file: IO[str] | None = None
    try:
        file = _locked(directory, where)
        holding = Holding(directory, file)
    except BaseException:  # a signal, too
        if file:
            file.close()
        surely(lambda: remove_unbegun(directory))
        raise
    with file:
        try:
            yield holding
        finally:
            with suppress(OSError):
                surely(holding.close)


def _locked(directory: Path, where: str) -> IO[str]:
    """The journal of `directory`, made where there is none."""
    try:
        directory.mkdir(exist_ok=True)
        if not (directory / JOURNAL).exists() and (strangers := sorted(path.name for path in directory.iterdir())):
            raise WriteError(f"{directory} holds {', '.join(strangers[:3])}: not ours; move it away first")
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
