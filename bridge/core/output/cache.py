"""Keep small files in the user's cache, checked when they are read.

Never fails who uses it.
An entry is a line of JSON (the digest of everything that decides the content, the digest of the rest, what it is) and
the content. A damaged or truncated file is no entry. The digests are no proof of who wrote it: whoever can write here
decides the graphs of later conversions. Entries hold no code and no path of a machine; compiled kernels are code.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bridge.core.output.temporary import write_whole

KINDS = {"graphs": "ONNX graphs without weights", "structures": "traced structures", "kernels": "compiled kernels"}
MAX_FILES = 200  # of a kind; those that were not used for longest are removed first
MAX_WAIT = 900.0  # seconds to wait for another process, which may be stopped: an export of 100 experts takes minutes
POLL = 0.05  # seconds between two tries to get a lock
SUFFIX, LOCK = ".cached", ".lock"
_ENTRY = re.compile(r"[0-9a-f]{32}\.cached")
# A file of kernels, the digest of its source, system, processor.
_KERNELS = re.compile(r"\w+-[0-9a-f]{16}\.\w+-[\w-]+(\.so)?")
_PARTIAL = re.compile(r"\.[\w.-]+\.partial")  # of `write_whole`
_LOCKS = re.compile(r"[0-9a-f]{32}\.lock")
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A file of the cache. `what`: the model that it is of, "" if the file does not say. `used`: seconds since 1970."""

    kind: str
    what: str
    bytes: int
    used: float
    path: Path

    @property
    def key(self) -> str:
        """The beginning of the digest of all that decides it: two models may be called the same."""
        digest = self.path.name.partition("-")[2] if self.kind == "kernels" else self.path.name
        return digest[:8]


def digest_of(parts: object) -> str:
    """The key of an entry: the digest of all that decides its content."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def directory(kind: str) -> Path:
    """Where entries of a kind are; RuntimeError for a user without a home directory."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one counts as none, as its specification says
    return (base if base.is_absolute() else Path.home() / ".cache") / "qbridge" / kind


def why_disabled() -> str:
    """Return why no entry can be stored for this user; "" if it can."""
    try:
        place = directory("")
    except RuntimeError:
        return "this user has no home directory; set XDG_CACHE_HOME to a directory"
    try:
        there = next(path for path in (place, *place.parents) if path.exists())
    except OSError as error:
        return f"{place} cannot be reached: {error.strerror}; set XDG_CACHE_HOME to a directory"
    if not there.is_dir():
        return f"{there} is not a directory"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def load(kind: str, key: str) -> bytes | None:
    """The content that was stored under `key`; None if there is no undamaged one."""
    try:
        path = _place(kind, key)
        head, body = _header_and_content(path.read_bytes())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: there is no home directory, or an absurd first line
        return None
    if head.get("key") != key or head.get("digest") != hashlib.sha256(body).hexdigest():
        return None
    with suppress(OSError):
        os.utime(path)
    return body


def store(kind: str, key: str, what: str, body: bytes) -> None:
    """Store a content; a directory that cannot be written is not an error. `what` is shown by `qbridge cache`."""
    with suppress(OSError, RuntimeError):
        path = _place(kind, key)
        make_directory(path.parent)
        head = {"key": key, "digest": hashlib.sha256(body).hexdigest(), "what": what}
        write_whole(path, json.dumps(head, sort_keys=True).encode() + b"\n" + body)
        make_room(kind)


def make_room(kind: str) -> None:
    """Remove the files of a kind that were not used for longest, and what killed writes left."""
    with suppress(OSError):
        by_age = sorted(_files(kind, _name_of(kind)), key=lambda file: file.stat().st_mtime)
        for old in [*by_age[:-MAX_FILES], *_abandoned(kind)]:
            old.unlink(missing_ok=True)


@contextmanager
def exclusively(kind: str, key: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep other processes and threads from making the same entry during the block: they wait, and then find it.

    `waiting` is called once if another makes it. The system drops the lock of a process that ends. Who waits for
    MAX_WAIT, or cannot lock, goes on without.
    """
    fd = _locked(kind, key, waiting)
    try:
        yield
    finally:
        if fd is not None:
            with suppress(OSError):  # before the lock is dropped: who waits for it looks whether it is still there
                _place(kind, key).with_suffix(LOCK).unlink()
            os.close(fd)


def get_or_make(
    kind: str,
    key: str,
    make: Callable[[], tuple[str, bytes]],
    read: Callable[[bytes], T],
    waiting: Callable[[], None] = lambda: None,
) -> T:
    """Return the entry of `key`; if there is no usable one, make and store it, in one process at a time.

    `make`: what, content. `read`: ValueError for a content that is not usable. `waiting`: see `exclusively`.
    """
    with suppress(ValueError):
        return _read(kind, key, read)
    with exclusively(kind, key, waiting):
        with suppress(ValueError):
            return _read(kind, key, read)
        what, body = make()
        store(kind, key, what, body)
        return read(body)


def entries() -> list[Entry]:
    """The entries of the cache, by kind, the last used first; compiled kernels are files of another form."""
    found = []
    for kind in KINDS:
        for path in _files(kind, _name_of(kind)):
            with suppress(OSError):
                status = path.stat()
                found.append(Entry(kind, _what(path, kind), status.st_size, status.st_mtime, path))
    order = list(KINDS)
    return sorted(found, key=lambda entry: (order.index(entry.kind), -entry.used))


def clear() -> list[Entry]:
    """Remove all entries and return them; other files stay. OSError if a file cannot be removed."""
    removed = entries()
    for entry in removed:
        entry.path.unlink(missing_ok=True)
    for kind in KINDS:
        for path in _files(kind, _LOCKS):
            _remove_unlocked(path)
        for path in _abandoned(kind):
            path.unlink(missing_ok=True)
    return removed


def make_directory(path: Path) -> None:
    """Make the directory of a kind and the one that holds all kinds, if they are not there, for this user; OSError."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    for directory in (path.parent, path):
        directory.mkdir(mode=0o700, exist_ok=True)


def why_untrusted(path: Path) -> str:
    """Return why code of a file or directory must not run, as another user may have written it; "" if it may."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user"
    return f"{path} can be written by other users" if status.st_mode & 0o022 else ""


def _read(kind: str, key: str, read: Callable[[bytes], T]) -> T:
    body = load(kind, key)
    if body is None:
        raise ValueError("there is no entry")
    return read(body)


def _place(kind: str, key: str) -> Path:
    return directory(kind) / f"{key[:32]}{SUFFIX}"


def _header_and_content(data: bytes) -> tuple[dict[str, str], bytes]:
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    if not isinstance(head, dict):
        raise ValueError("the first line of an entry is an object")
    return head, body


def _locked(kind: str, key: str, waiting: Callable[[], None]) -> int | None:
    """Open and lock the file beside an entry; None if it cannot be, or if its owner keeps it for too long."""
    end, is_told = time.monotonic() + MAX_WAIT, False
    try:
        path = _place(kind, key).with_suffix(LOCK)
        make_directory(path.parent)
        while time.monotonic() < end:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                    return fd
            except BlockingIOError:
                os.close(fd)
                if not is_told:
                    waiting()
                is_told = True
                time.sleep(POLL)
                continue
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
    except (OSError, RuntimeError):
        pass  # no home directory, a file system without locks, a directory of another user
    return None


def _files(kind: str, name: re.Pattern[str]) -> list[Path]:
    """The files of a kind that are called so; others in the directory are not of this package."""
    try:
        paths = [*directory(kind).iterdir()]
        return [path for path in paths if name.fullmatch(path.name) and path.is_file() and not path.is_symlink()]
    except (OSError, RuntimeError):
        return []


def _name_of(kind: str) -> re.Pattern[str]:
    return _KERNELS if kind == "kernels" else _ENTRY


def _abandoned(kind: str) -> list[Path]:
    """What killed writes left: no write takes as long."""
    before = time.time() - MAX_WAIT
    return [path for path in _files(kind, _PARTIAL) if path.stat().st_mtime < before]


def _remove_unlocked(path: Path) -> None:
    """Remove the lock file of a process that was killed."""
    with suppress(OSError), path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _what(path: Path, kind: str) -> str:
    """What a file says that it is of; the name of a file of kernels begins with theirs."""
    if kind == "kernels":
        return path.name.partition("-")[0]
    try:
        with path.open("rb") as file:
            return str(_header_and_content(file.readline(1 << 16))[0].get("what", ""))
    except (OSError, RuntimeError, ValueError):
        return ""
