"""Temporary directories that a killed run does not leave for ever: the next one removes them; no others."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "qbridge-"
FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def scratch(parent: str | Path | None = None) -> Iterator[Path]:
    """A directory that is gone when the block ends, under `parent` or the system's; first those of killed runs go.

    A lock on the directory says that its process lives; where the file system has none, no other's is removed.
    """
    base = Path(parent or tempfile.gettempdir())
    for path in base.glob(f"{PREFIX}*"):
        _remove_abandoned(path)
    path = base / f"{PREFIX}{secrets.token_hex(8)}"
    fd = None
    try:
        while fd is None:
            path.mkdir(mode=0o700, exist_ok=True)
            fd = _locked(path, 0)
        yield path
    finally:
        surely(lambda: shutil.rmtree(path, ignore_errors=True))
        if fd is not None:
            os.close(fd)


def surely(clean: Callable[[], None]) -> None:
    """Clean up, once more where a signal cuts it short: the command line lets none through after the first."""
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
    """Open and lock a directory; None where another process removed it meanwhile, taking it for abandoned."""
    try:
        fd = os.open(path, FLAGS)
    except FileNotFoundError:
        return None
    kept = False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | how)
        except OSError:
            if how:  # somebody holds it, or there are no locks: not to be removed
                raise
        kept = path.exists() and path.stat().st_ino == os.fstat(fd).st_ino
        return fd if kept else None
    finally:
        if not kept:
            os.close(fd)
