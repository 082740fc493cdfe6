"""The output directory: all or nothing. Work happens in a hidden sibling; one rename makes it visible.

A run that fails removes its work. A run that is killed leaves its work and a journal; the next run with the same plan
and the same inputs goes on from there, any other run refuses it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bridge.errors import WriteError

JOURNAL = "journal.jsonl"
MARK = "bridge.json"  # in every model that bridge wrote


@dataclass(frozen=True)
class Work:
    """A directory under construction. `done`: what a killed run of the same work had finished, and told."""

    directory: Path
    done: Mapping[str, Mapping[str, Any]]
    journal: IO[str]

    def mark(self, name: str, told: Mapping[str, Any]) -> None:
        """Note that `name` is wholly written, and what there is to tell of it; survives a kill of the process."""
        self.journal.write(json.dumps({"done": name, "told": dict(told)}) + "\n")
        self.journal.flush()


def check_free(out: Path, overwrite: bool, mark: str = MARK) -> None:
    """Refuse an output that exists, before any work; only what holds the file `mark` is ours to replace."""
    if out.is_symlink() and not out.exists():
        raise WriteError(f"{out} is a symbolic link to nothing; remove it, or choose another directory")
    if out.exists() and not overwrite:
        raise WriteError(f"{out} exists already; choose another directory, or pass overwrite=True (--overwrite)")
    if out.exists() and overwrite and not (out / mark).exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise WriteError(
            f"{out} was not written by bridge (no {mark} in it): it is not overwritten; remove it yourself"
        )


def check_disk(out: Path, need: int) -> None:
    """Refuse work that the disk cannot hold; `need` in bytes. What a killed run has reserved already counts as free."""
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    reserved = sum(path.stat().st_blocks * 512 for path in _work(out.absolute()).glob("**/*") if path.is_file())
    free = shutil.disk_usage(parent).free + reserved
    if free < need:
        raise WriteError(
            f"{parent} has {free / 1e9:.2f} GB free, the plan needs {need / 1e9:.2f} GB: free some, or use another disk"
        )


@contextmanager
def output_directory(
    out: Path, identity: str, *, overwrite: bool = False, resume: bool = True, mark: str = MARK
) -> Iterator[Work]:
    """Yield the hidden work directory of `out`; rename it to `out` at the end, remove it if the body raises.

    Args:
        identity: digest of everything that decides the bytes; a killed run's work is continued only under the same one.
    """
    check_free(out, overwrite, mark)
    out = out.absolute()
    work = _work(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        journal = (work / JOURNAL).open("a+")
    except OSError as error:
        raise WriteError(f"{out}: cannot be created: {error.strerror}") from error
    with journal:
        _lock(journal, work)
        _restore(out)
        done = _continue(journal, work, identity, resume)
        try:
            yield Work(work, done, journal)
        except BaseException as error:
            shutil.rmtree(work, ignore_errors=True)
            if isinstance(error, OSError):
                raise _not_written(error, out) from error
            raise
        _make_visible(work, out, overwrite, mark)


def _work(out: Path) -> Path:
    return out.parent / f".{out.name}.partial"


def _not_written(error: OSError, out: Path) -> WriteError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteError(f"{out.parent}: the disk is full; nothing was kept. Free some space and run again")
    return WriteError(f"{error.filename or out}: {error.strerror}; nothing was kept")


def _lock(journal: IO[str], work: Path) -> None:
    """Own the work directory; WriteError where another run does, or finished it while this one opened it."""
    busy = WriteError(f"{work} is being written by another run; wait for it, or choose another output")
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here = (work / JOURNAL).stat()
    except OSError as error:
        raise busy from error
    if here.st_ino != os.fstat(journal.fileno()).st_ino:
        raise busy


def _continue(journal: IO[str], work: Path, identity: str, resume: bool) -> dict[str, Mapping[str, Any]]:
    """Read the journal of a killed run; start a new one where there is none or `resume` is off."""
    journal.seek(0)
    lines = [line for line in journal.read().split("\n")[:-1] if line]  # a torn last line was never acknowledged
    strangers = [path.name for path in work.iterdir() if path.name != JOURNAL]
    if not lines and strangers:
        raise WriteError(
            f"{work} holds {', '.join(sorted(strangers)[:3])} and no journal: not ours; move it away first"
        )
    if lines and resume:
        first = _record(lines[0], work)
        if first.get("identity") != identity:
            raise WriteError(
                f"{work} is left from a killed run ({first.get('identity', '?')[:12]}, now {identity[:12]}): "
                "it is not mixed in. Remove it, or pass resume=False (--no-resume) to discard it"
            )
        records = [_record(line, work) for line in lines[1:]]
        return {record["done"]: record.get("told", {}) for record in records}
    for path in work.iterdir():
        if path.name != JOURNAL:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    journal.truncate(0)
    journal.write(json.dumps({"identity": identity}) + "\n")
    journal.flush()
    return {}


def _record(line: str, work: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise WriteError(f"{work / JOURNAL} is damaged ({error}); remove {work}, or pass resume=False") from error
    return record if isinstance(record, dict) else {}


def _restore(out: Path) -> None:
    """Put back the old output where a run was killed between the two renames of an overwrite."""
    aside = out.parent / f".{out.name}.old"
    if aside.exists() and not out.exists():
        aside.rename(out)


def _make_visible(work: Path, out: Path, overwrite: bool, mark: str) -> None:
    """One rename; with `overwrite` the old directory steps aside first and is removed last.

    The journal goes after the rename: a run killed between the two leaves a whole output and a file that nobody reads.
    What appeared at `out` during the run is somebody's: it stays, and so does the work.
    """
    aside = out.parent / f".{out.name}.old"
    try:
        check_free(out, overwrite, mark)
        if out.exists():
            shutil.rmtree(aside, ignore_errors=True)
            out.rename(aside)
        work.rename(out)
    except (WriteError, OSError) as error:
        raise WriteError(f"{error}; the finished work is kept in {work}: rename it, or run again") from error
    (out / JOURNAL).unlink()
    shutil.rmtree(aside, ignore_errors=True)
