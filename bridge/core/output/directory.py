"""Write a directory in a hidden sibling and publish it by rename.

A run that fails removes its work. A run that is stopped or killed, fills the disk or loses its source's server leaves
its work and a journal; the next run with the same plan and the same inputs continues it, any other run refuses it.

Nothing is flushed to the disk: this holds if a process is killed. After a loss of power a journal is not trusted, and
an output that was just published may lack bytes: `bridge.verify` and goldens find out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from bridge.core.addresses import check_length
from bridge.core.errors import UsageError, WriteError, disk_is_full, is_unreachable, reason
from bridge.core.output.journal import begin, busy, left, lock, remove_unbegun, valid_lines, void
from bridge.core.output.names import CALIBRATING, CALIBRATION, JOURNAL, MANIFEST
from bridge.core.output.replace import check_free, make_visible, recover, reserved, work_directory
from bridge.core.output.temporary import real_path, run_despite_signal
from bridge.core.text import size

# The end of a message on unfinished work that is kept, by whether the run resumes.
HOW_TO_GO_ON = {
    True: "the same command goes on from there, resume=False (--no-resume) discards it",
    False: "the command without resume=False (--no-resume) goes on from there",
}


@dataclass(frozen=True)
class Work:
    """A directory under construction. `done`: finished parts of an unfinished run of the same work, with their results.

    `identity`: of the work, in the journal, for processes that join it.
    """

    directory: Path
    done: Mapping[str, Mapping[str, Any]]
    journal: IO[str]
    identity: str = ""

    def mark(self, name: str, result: Mapping[str, Any]) -> None:
        """Record that `name` is written, with its result; survives a kill of the process."""
        self.journal.write(json.dumps({"done": name, "told": dict(result)}) + "\n")
        self.journal.flush()


def check_file_free(path: Path, overwrite: bool, what: str, suffix: str) -> None:
    """UsageError if a file, `what`, cannot be written to `path`; called before the work begins."""
    check_length(path)
    if path.suffix != suffix:
        raise UsageError(f"{path}: {what} ends in {suffix}: name it {path.with_suffix(suffix)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: {path.absolute().parent} is not a directory; make it first")
    if path.is_dir():
        raise UsageError(f"{path}: is a directory; choose another name")
    if path.exists() and not overwrite:
        raise UsageError(f"{path}: exists already; choose another name, or overwrite it (--overwrite)")
    try:
        with TemporaryFile(dir=path.absolute().parent):  # the mode alone does not tell: a file system may be read-only
            pass
    except OSError as error:
        raise UsageError(
            f"{path}: {what} cannot be written there: {reason(error)}; choose another directory"
        ) from error


def check_disk(out: Path, need: int, what: str = "the plan") -> None:
    """Refuse work that is larger than the free disk; `need` in bytes, by `what`.

    The work of an unfinished run counts as free.
    """
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free + reserved(out)
    if free < need:
        raise WriteError(f"{parent} has {size(free)} free, {what} needs {size(need)}: free some, or use another disk")


@contextmanager
def output_directory(
    out: Path, identity: str, *, overwrite: bool = False, resume: bool = True, mark: str = MANIFEST
) -> Iterator[Work]:
    """Yield the hidden work directory of `out`; rename it to `out` at the end, remove it if the body raises.

    Args:
        identity: digest of everything that decides the bytes; only the same one continues unfinished work.
    """
    recover(out, mark)
    check_free(out, overwrite, mark)
    out = real_path(out)
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
            if whole and isinstance(error, WriteError):  # its message says that the finished work is kept
                raise
            kept = can_go_on(error) and _is_there(journal, work) and _has_finished(journal, work)
            if not kept:
                run_despite_signal(lambda: _discard(journal, work, identity))
            failure = _not_written(error, out, kept) if isinstance(error, OSError) else error
            if kept:
                failure.add_note(f"what is done is kept in {work}; {HOW_TO_GO_ON[resume]}")
            if failure is error:
                raise
            raise failure from error


@contextmanager
def partial_directory(
    work: Path, identity: str, *, resume: bool = True, keeps: tuple[type[Exception], ...] = ()
) -> Iterator[Work]:
    """Yield a directory for parts of work that has no directory of its own; it is removed unless the work can go on.

    keeps: errors after which what is done stays there, too.
    """
    work = work.absolute()
    with _owned(work, work) as journal:
        done = left(journal, work, identity if resume else None)
        if done is None:
            begin(journal, work, identity)
        try:
            yield Work(work, done or {}, journal, identity)
        except BaseException as error:
            kept = isinstance(error, keeps) or can_go_on(error)
            if not (kept and _has_finished(journal, work)):
                run_despite_signal(lambda: _discard(journal, work, identity))
            elif isinstance(error, keeps):
                error.add_note(f"what was done before is kept in {work}; resume=False (--no-resume) discards it")
            else:
                error.add_note(f"what is done is kept in {work}; the same command goes on from there")
            raise
        run_despite_signal(lambda: _discard(journal, work, identity))


def can_go_on(error: BaseException) -> bool:
    """Whether the work is as good as before: an interrupt, too little memory, a full disk, an unreachable server."""
    lacking = isinstance(error, MemoryError) or disk_is_full(error) or is_unreachable(error)
    return lacking or not isinstance(error, Exception)


def _has_finished(journal: IO[str], work: Path) -> bool:
    """Whether any part of the work is finished, so that the next run can go on from it."""
    lines = valid_lines(journal, work)
    calibrated = (work / CALIBRATION).exists() or (work / CALIBRATING / JOURNAL).exists()
    return any(line.startswith('{"done": ') for line in lines) or (bool(lines) and calibrated)


def _not_written(error: OSError, out: Path, kept: bool = False) -> WriteError:
    lost = "" if kept else "; nothing was kept"
    if disk_is_full(error):
        return WriteError(f"{out.parent}: the disk is full{lost}. Free some space and run again")
    return WriteError(f"{error.filename or out} cannot be written: {error.strerror or error}{lost}")


@contextmanager
def _owned(out: Path, work: Path) -> Iterator[IO[str]]:
    """Own the work directory by its journal; if the block raises, new directories are removed."""
    new = [parent for parent in out.parents if not parent.exists()]
    journal: IO[str] | None = None
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            work.mkdir(exist_ok=True)
            journal = (work / JOURNAL).open("a+")
            lock(journal, work)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and error.filename == str(work / JOURNAL):
                raise busy(work) from error  # its owner renamed it while this one opened it
            raise _not_written(error, out) from error
        yield journal
    except BaseException:
        _close(journal)
        run_despite_signal(lambda: remove_unbegun(work, new))
        raise
    finally:
        _close(journal)


def _close(journal: IO[str] | None) -> None:
    with suppress(OSError):  # a full disk: the run has failed, or its journal is gone already
        if journal:
            journal.close()


def _is_there(journal: IO[str], work: Path) -> bool:
    """Whether the work is still in its hidden directory: a rename may have published it before an interrupt came."""
    try:
        return os.path.samestat(os.fstat(journal.fileno()), (work / JOURNAL).stat())
    except FileNotFoundError:
        return False


def _discard(journal: IO[str], work: Path, identity: str) -> None:
    """Remove the work; after its publication the directory of that name is another run's."""
    if not _is_there(journal, work):
        return
    try:
        void(journal, work, identity)
    except OSError:  # a full disk: at least no part is recorded as done
        with suppress(OSError):
            os.ftruncate(journal.fileno(), 0)
    shutil.rmtree(work, ignore_errors=True)
