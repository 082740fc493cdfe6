"""Keep small files in the user's cache, checked when they are read.

Never fails who uses it.
An entry is a line of JSON (the digest of everything that decides the content, the digest of the rest, what it is) and
the content. A damaged, truncated or foreign file is no entry. Nothing of it is run, and it holds no path of a machine,
so a directory of them may be copied and shared.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bridge.core.output.temporary import write_whole

KINDS = {"graphs": "ONNX graphs without weights", "structures": "traced structures", "kernels": "compiled kernels"}
MAX_FILES = 200  # of a kind; those that were not used for longest are removed first
LONGEST = 900.0  # seconds to wait for another process, which may be stopped: an export of 100 experts takes minutes
LOOK = 0.05  # seconds between two looks
SUFFIX, LOCK = ".cached", ".lock"


@dataclass(frozen=True)
class Entry:
    """A file of the cache. `what`: the model that it is of, "" if the file does not say. `used`: seconds since 1970."""

    kind: str
    what: str
    bytes: int
    used: float
    path: Path


def digest_of(parts: object) -> str:
    """The key of an entry: the digest of all that decides its content."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def directory(kind: str) -> Path:
    """Where entries of a kind are; RuntimeError for a user without a home directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qbridge" / kind


def load(kind: str, key: str) -> bytes | None:
    """The content that was stored under `key`; None if there is no undamaged one."""
    try:
        path = _place(kind, key)
        head, body = _parts(path.read_bytes())
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
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"key": key, "digest": hashlib.sha256(body).hexdigest(), "what": what}
        write_whole(path, json.dumps(head, sort_keys=True).encode() + b"\n" + body)
        by_age = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-MAX_FILES]:
            old.unlink(missing_ok=True)


@contextmanager
def making(kind: str, key: str) -> Iterator[None]:
    """Keep other processes and threads from making the same entry during the block: they wait, and then find it.

    The system drops the lock of a process that ends. Who waits for LONGEST, or cannot lock, goes on without.
    """
    fd = _locked(kind, key)
    try:
        yield
    finally:
        if fd is not None:
            with suppress(OSError):  # before the lock is dropped: who waits for it looks whether it is still there
                _place(kind, key).with_suffix(LOCK).unlink()
            os.close(fd)


def made_once(kind: str, key: str, make: Callable[[], tuple[str, bytes]]) -> bytes:
    """The content under `key`; without one it is made, in one process at a time, and stored. `make`: what, content."""
    body = load(kind, key)
    if body is not None:
        return body
    with making(kind, key):
        body = load(kind, key)
        if body is None:
            what, body = make()
            store(kind, key, what, body)
    return body


def entries() -> list[Entry]:
    """What the cache holds, by kind, the last used first; compiled kernels are files of another form."""
    found = []
    for kind in KINDS:
        for path in _files(kind):
            with suppress(OSError):
                stat = path.stat()
                found.append(Entry(kind, _what(path, kind), stat.st_size, stat.st_mtime, path))
    order = list(KINDS)
    return sorted(found, key=lambda entry: (order.index(entry.kind), -entry.used))


def clear() -> list[Entry]:
    """Remove what the cache holds and return it. OSError if a file cannot be removed."""
    removed = entries()
    for entry in removed:
        entry.path.unlink(missing_ok=True)
    return removed


def _place(kind: str, key: str) -> Path:
    return directory(kind) / f"{key[:32]}{SUFFIX}"


def _parts(data: bytes) -> tuple[dict[str, str], bytes]:
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    if not isinstance(head, dict):
        raise ValueError("the first line of an entry is an object")
    return head, body


def _locked(kind: str, key: str) -> int | None:
    """Open and lock the file beside an entry; None if it cannot be, or if its owner keeps it for too long."""
    end = time.monotonic() + LONGEST
    try:
        path = _place(kind, key).with_suffix(LOCK)
        path.parent.mkdir(parents=True, exist_ok=True)
        while time.monotonic() < end:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                    return fd
            except BlockingIOError:
                time.sleep(LOOK)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
    except (OSError, RuntimeError):
        pass  # no home directory, a file system without locks, a directory of another user
    return None


def _files(kind: str) -> list[Path]:
    try:
        return [path for path in directory(kind).iterdir() if path.is_file() and path.suffix != LOCK]
    except (OSError, RuntimeError):
        return []


def _what(path: Path, kind: str) -> str:
    """What a file says that it is of; the name of a file of kernels begins with theirs."""
    if path.suffix != SUFFIX:
        return path.name.partition("-")[0] if kind == "kernels" else ""
    try:
        with path.open("rb") as file:
            return str(_parts(file.readline(1 << 16))[0].get("what", ""))
    except (OSError, RuntimeError, ValueError):
        return ""
