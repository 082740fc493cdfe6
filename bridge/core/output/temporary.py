"""Temporary directories that are removed, even after a kill.

They are removed at the end, or by the next run after a kill.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "qbridge-"
FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def temporary_directory(parent: str | Path | None = None) -> Iterator[Path]:
    """Make a directory under `parent` or the system's for the block; first remove those of killed runs.

    A locked directory has a running process; on a file system without locks no other directory is removed.
    """
    base = Path(parent or tempfile.gettempdir())
    for path in base.glob(f"{PREFIX}*"):
        _remove_abandoned(path)
    path = base / f"{PREFIX}{os.urandom(8).hex()}"
    fd = None
    try:
        while fd is None:
            path.mkdir(mode=0o700, exist_ok=True)
            fd = _locked(path, 0)
        yield path
    finally:
        run_despite_signal(lambda: shutil.rmtree(path, ignore_errors=True))
        if fd is not None:
            os.close(fd)


def real_path(path: Path) -> Path:
    """The absolute path of an output; of a link, that of what it names: a rename would replace the link itself."""
    return path.resolve() if os.path.islink(path) else path.absolute()  # noqa: PTH114 -- False for a name that is too long


def write_whole(path: Path, data: bytes | memoryview | Iterator[bytes], partial: str = "") -> None:
    """Write a file under another name, then rename it: a reader sees the old or the whole new file.

    `data`: an iterator yields it in pieces. `partial`: the other name, if only one run writes at a time; by default it
    has the process id.
    """
    path = real_path(path)
    beside = path.with_name(partial or f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            file.writelines(data if isinstance(data, Iterator) else [data])
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def run_despite_signal(clean: Callable[[], None]) -> None:
    """Clean up, and again if a signal interrupts it: the command line lets only the first signal through."""
    try:
        clean()
    except BaseException:
        clean()
        raise


def _remove_abandoned(path: Path) -> None:
    """Remove a directory that no living process has locked."""
    with suppress(OSError):
        fd = _locked(path, fcntl.LOCK_NB)
        if fd is None:
            return
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


def _locked(path: Path, how: int) -> int | None:
    """Open and lock a directory; None if another process removed it meanwhile as abandoned."""
    try:
        fd = os.open(path, FLAGS)
    except FileNotFoundError:
        return None
    kept = False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | how)
        except OSError:
            if how:  # another process has the lock, or there are no locks: do not remove it
                raise
        kept = path.exists() and path.stat().st_ino == os.fstat(fd).st_ino
        return fd if kept else None
    finally:
        if not kept:
            os.close(fd)
