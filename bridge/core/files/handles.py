"""Open files, local or remote, and read byte ranges of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.core.arrays import np
from bridge.core.errors import SourceError
from bridge.core.remote.path import Handle, remote
from bridge.core.remote.store import is_html

HEAD = 65536  # one read covers the header of all but the largest shards
PIECE = 64 << 20  # bytes of one system call, so that Ctrl-C works within some tens of milliseconds
LFS = b"version https://git-lfs.github.com/spec"


def open_file(path: Path) -> Handle:
    """Open `path` for reading; SourceError if the system refuses."""
    try:
        if far := remote(path):
            return far.handle()
        return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError as error:
        why = f"{dead}; get the file again" if (dead := dead_link(path)) else f"cannot be opened: {error.strerror}"
        raise SourceError(f"{path}: {why}") from error


@contextmanager
def opened(path: Path) -> Iterator[Handle]:
    """Open `path` for reading while the block runs."""
    fd = open_file(path)
    try:
        yield fd
    finally:
        close_file(fd)


def close_file(fd: Handle) -> None:
    """Close a handle of `open_file`."""
    if isinstance(fd, int):
        os.close(fd)


def size_of(fd: Handle) -> int:
    """Return the size of the file in bytes."""
    return os.fstat(fd).st_size if isinstance(fd, int) else fd.nbytes


def read_at(fd: Handle, count: int, offset: int, path: Path) -> bytes:
    """Return bytes of a header or an index from `offset` on: fewer if the file ends before."""
    try:
        return os.pread(fd, count, offset) if isinstance(fd, int) else fd.read_at(count, offset)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read at byte {offset}: {error.strerror}") from error


def identity(fd: Handle) -> tuple[int, int, int, int]:
    """Return a key that differs for another file and after a change."""
    if not isinstance(fd, int):
        return fd.identity
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_into(fd: Handle, out: np.ndarray, offset: int, path: Path) -> None:
    """Fill the contiguous array `out` from `offset` of the file on."""
    view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # NumPy's stubs miss Buffer on 3.11
    done = 0
    while done < len(view):
        try:
            if isinstance(fd, int):
                count = os.preadv(fd, [view[done : done + PIECE]], offset + done)
            else:
                count = fd.read_into(view[done:], offset + done)
        except OSError as error:
            raise SourceError(f"{path}: cannot be read at byte {offset + done}: {error.strerror}") from error
        if not count:
            raise SourceError(f"{path}: ends at byte {offset + done}, inside a tensor: truncated since it was opened")
        done += count


def dead_link(path: Path) -> str:
    """Say which file a link names that is not there; "" for anything else."""
    return f"a link to {path.readlink()}, which is not there" if path.is_symlink() and not path.exists() else ""


def why_not_copied(path: Path) -> str:
    """Why a file beside weights cannot be copied: a link to nothing, a Git-LFS pointer, unreadable; "" if it can."""
    if remote(path):
        return ""
    if dead := dead_link(path):
        return f"{dead}; get the file again, or remove the link"
    if not path.is_file():
        return "not a regular file; remove it"
    try:
        with opened(path) as fd:
            pointer = read_at(fd, len(LFS), 0, path) == LFS
    except SourceError as error:
        return str(error).removeprefix(f"{path}: ")
    return "a Git-LFS pointer instead of the file; run `git lfs pull` in its directory" if pointer else ""


def refuse_pointer(path: Path, head: bytes) -> None:
    """SourceError for files that often replace weights: a Git-LFS pointer, a web page, an empty file."""
    if head.startswith(LFS):
        raise SourceError(f"{path}: a Git-LFS pointer instead of weights; run `git lfs pull` in its directory")
    if not head:
        raise SourceError(f"{path}: an empty file; get it again")
    if is_html(head):
        raise SourceError(f"{path}: a web page instead of weights (a failed download?); get it again")
