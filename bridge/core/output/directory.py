"""The output directory: all or nothing. Work happens in a hidden sibling; one rename makes it visible.

A run that fails removes its work. A run that is killed leaves its work and a journal; the next run with the same plan
and the same inputs goes on from there, any other run refuses it.

Nothing waits for the disk: this holds where a process is killed. After a loss of power a journal is not trusted, and an
output that became visible a moment before may lack bytes: `bridge.verify` and goldens tell.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bridge.errors import UsageError, WriteError, disk_is_full
from bridge.journal import JOURNAL, begin, busy, left, lock, remove_unbegun, void
from bridge.paths import check_length
from bridge.scratch import surely
from bridge.show import size
from bridge.visible import MARK, check_free, make_visible, reserved, settle, work_directory


@dataclass(frozen=True)
class Work:
    """A directory under construction. `done`: what a killed run of the same work had finished, and told.

    `identity`: what the journal says the work is, for processes that join it.
    """

    directory: Path
    done: Mapping[str, Mapping[str, Any]]
    journal: IO[str]
    identity: str = ""

    def mark(self, name: str, told: Mapping[str, Any]) -> None:
        """Note that `name` is wholly written, and what there is to tell of it; survives a kill of the process."""
        self.journal.write(json.dumps({"done": name, "told": dict(told)}) + "\n")
        self.journal.flush()


def check_file_free(path: Path, overwrite: bool, what: str, suffix: str) -> None:
    """UsageError where no file, `what`, can be written to `path`: to be asked before minutes of work, not after."""
    check_length(path)
    if path.suffix != suffix:
        raise UsageError(f"{path}: {what} ends in {suffix}: name it {path.with_suffix(suffix)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: {path.absolute().parent} is no directory; make it first")
    if path.exists() and not overwrite:
        raise UsageError(f"{path}: exists already; choose another name, or overwrite it (--overwrite)")


def check_disk(out: Path, need: int) -> None:
    """Refuse work that the disk cannot hold; `need` in bytes. What a killed run has reserved already counts as free."""
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free + reserved(out)
    if free < need:
        raise WriteError(f"{parent} has {size(free)} free, the plan needs {size(need)}: free some, or use another disk")


@contextmanager
def output_directory(
    out: Path, identity: str, *, overwrite: bool = False, resume: bool = True, mark: str = MARK
) -> Iterator[Work]:
    """Yield the hidden work directory of `out`; rename it to `out` at the end, remove it if the body raises.

    Args:
        identity: digest of everything that decides the bytes; a killed run's work is continued only under the same one.
    """
    settle(out, mark)
    check_free(out, overwrite, mark)
    out = out.absolute()
    work = work_directory(out)
    with _owned(out, work) as journal:
        check_free(out, overwrite, mark)  # another run may have ended since
        done, whole = left(journal, work, identity if resume else None), False
        try:
            if done is None:
                begin(journal, work, identity)
            yield Work(work, done or {}, journal, identity)
            whole = True
            make_visible(work, out, overwrite, mark)
        except BaseException as error:
            if whole and isinstance(error, WriteError):  # which says that the finished work is kept
                raise
            surely(lambda: _discard(journal, work, identity))
            if isinstance(error, OSError):
                raise _not_written(error, out) from error
            raise


def _not_written(error: OSError, out: Path) -> WriteError:
    if disk_is_full(error):
        return WriteError(f"{out.parent}: the disk is full; nothing was kept. Free some space and run again")
    return WriteError(f"{error.filename or out}: {error.strerror}; nothing was kept")


@contextmanager
def _owned(out: Path, work: Path) -> Iterator[IO[str]]:
    """Own the work directory by its journal; where the block raises, nothing stays that was made for it alone."""
    made = [parent for parent in out.parents if not parent.exists()]
    journal: IO[str] | None = None
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            work.mkdir(exist_ok=True)
            journal = (work / JOURNAL).open("a+")
            lock(journal, work)
        except FileNotFoundError as error:  # its owner renamed it while this one opened it
            raise busy(work) from error
        except OSError as error:
            raise _not_written(error, out) from error
        yield journal
    except BaseException:
        _close(journal)
        surely(lambda: _remove_unbegun(work, made))
        raise
    finally:
        _close(journal)


def _close(journal: IO[str] | None) -> None:
    with suppress(OSError):  # a full disk: the run has failed, or its journal is gone already
        if journal:
            journal.close()


def _remove_unbegun(work: Path, made: list[Path]) -> None:
    """Remove a work directory whose journal says nothing, and the parents `made` for it; what holds anything stays."""
    remove_unbegun(work)
    with suppress(OSError):
        for parent in made:
            parent.rmdir()


def _discard(journal: IO[str], work: Path, identity: str) -> None:
    """Remove the work; where it is visible already, what is called so now is another run's."""
    try:
        if not os.path.samestat(os.fstat(journal.fileno()), (work / JOURNAL).stat()):
            return
    except FileNotFoundError:
        return
    try:
        void(journal, work, identity)
    except OSError:  # a full disk: at least nothing is called done
        with suppress(OSError):
            os.ftruncate(journal.fileno(), 0)
    shutil.rmtree(work, ignore_errors=True)
