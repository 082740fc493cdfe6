"""A remote directory, listed once, with the interface of `pathlib`."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast, overload

from bridge.core.errors import SourceError
from bridge.core.remote.readers import result, start
from bridge.core.remote.store import RemoteStat, Store, check_names

if TYPE_CHECKING:
    from bridge.core.remote.blocks import Blocks

MEMORY = 256 << 20  # bytes of blocks of weights: both passes over a matrix of that size fetch it once
PAGE = 64 << 10  # bytes of a request for headers and indices, which are read a few hundred bytes at once
PAGES = 8 << 20
MAX_SMALL = 1 << 30  # bytes of a file that is read whole: the largest tokenizers take some tens of megabytes


@dataclass(frozen=True)
class RemoteTree:
    """A remote directory that is being read.

    `opened` replaces missing tags: what was read of a file without one is not resumed by a later run.
    """

    store: Store
    opened: str = field(default_factory=lambda: os.urandom(16).hex(), repr=False)

    def __post_init__(self) -> None:
        check_names(self.store.files, self.store.where)
        for name, look in self.store.files.items():
            if type(look.nbytes) is not int or not 0 <= look.nbytes < 1 << 63:
                where = f"{self.store.where}/{name}"
                raise SourceError(f"{where}: the server lists an invalid size ({look.nbytes!r} bytes); ask its owner")

    @cached_property
    def weights(self) -> Blocks:
        from bridge.core.remote.blocks import Blocks  # NumPy takes longer to import than most local files to read

        return Blocks(self.store.fetch, MEMORY, given_up=self.store.given_up)

    @cached_property
    def pages(self) -> Blocks:
        """Blocks of headers and indices: nothing more than was asked for."""
        from bridge.core.remote.blocks import Blocks

        return Blocks(self.store.fetch, PAGES, PAGE, connections=4, ahead=False, given_up=self.store.given_up)


@dataclass(frozen=True)
class RemoteFile:
    """A file that is open for reading, in place of a descriptor."""

    tree: RemoteTree = field(repr=False)
    name: str

    @property
    def stat(self) -> RemoteStat:
        return self.tree.store.files[self.name]

    @property
    def nbytes(self) -> int:
        return self.stat.nbytes

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Differs for another file, and after a change: as `identity` of local files."""
        look = self.stat
        return 0, 0, look.nbytes, _number(look.tag or self.tree.opened)

    def read_into(self, out: memoryview, begin: int) -> int:
        """Fill `out` with weights; returns how many bytes there were."""
        count = max(0, min(len(out), self.nbytes - begin))
        self.tree.weights.read(self.name, self.nbytes, begin, out[:count])
        return count

    def read_at(self, count: int, begin: int) -> bytes:
        """Bytes of a header or an index: fewer at the end of the file."""
        count = max(0, min(count, self.nbytes - begin))
        head, store = self.stat.head, self.tree.store
        if begin + count <= len(head):
            return head[begin : begin + count]
        out = bytearray(count)
        if count > PAGE:
            result(start(partial(store.fetch, self.name, begin, memoryview(out))), store.given_up, str(self.name))
        else:
            self.tree.pages.read(self.name, self.nbytes, begin, memoryview(out))
        return bytes(out)


@lru_cache(maxsize=1024)  # asked for with each piece of a tensor
def _number(tag: str) -> int:
    """A tag as a number of 64 bits."""
    return int.from_bytes(sha256(tag.encode()).digest()[:8], "big")


Handle = int | RemoteFile  # a file that is open for reading: a descriptor if it is local


class _Raw(io.RawIOBase):
    """A remote file as a stream, for readers of streams: tar archives, pickles of old files."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        found = self._file.read_at(len(out), self._at)
        out[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._file.nbytes)[whence]
        return self._at


class _Stat(NamedTuple):
    """What readers use of `os.stat_result`; the time is a number that changes when the file does."""

    st_size: int
    st_mtime_ns: int


class RemotePath:
    """A file or directory of a tree; `relative` is "" for the tree's root, `str()` what messages call it."""

    def __init__(self, tree: RemoteTree, relative: str = "") -> None:
        self.tree, self._relative = tree, relative

    def __str__(self) -> str:
        return f"{self.tree.store.where}/{self._relative}".rstrip("/")

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> RemotePath:
        joined = str(PurePosixPath(self._relative, name))
        return RemotePath(self.tree, "" if joined == "." else joined)

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.tree, self._relative.rpartition("/")[0])

    def relative_to(self, other: RemotePath) -> PurePosixPath:
        return PurePosixPath(self._relative).relative_to(other._relative)

    def is_file(self) -> bool:
        return self._relative in self.tree.store.files

    def is_dir(self) -> bool:
        return not self._relative or any(name.startswith(f"{self._relative}/") for name in self.tree.store.files)

    def is_symlink(self) -> bool:
        return False

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def files(self) -> Iterator[tuple[str, RemotePath]]:
        """Every file below, by its name relative to this directory."""
        prefix = f"{self._relative}/" if self._relative else ""
        for name in sorted(self.tree.store.files):
            if name.startswith(prefix):
                yield name.removeprefix(prefix), RemotePath(self.tree, name)

    def iterdir(self) -> Iterator[RemotePath]:
        for name in dict.fromkeys(name.partition("/")[0] for name, _ in self.files()):
            yield self / name

    def rglob(self, pattern: str) -> Iterator[RemotePath]:
        """Files by their own name, wherever below."""
        return (path for _, path in self.files() if fnmatchcase(path.name, pattern))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What matches a pattern without `**`; one that ends in `/` matches directories only."""
        wanted, found = pattern.rstrip("/").split("/"), dict[str, None]()
        depth = len(wanted)
        for parts in (name.split("/") for name, _ in self.files()):
            long_enough = len(parts) > depth if pattern.endswith("/") else len(parts) >= depth
            if long_enough and all(map(fnmatchcase, parts, wanted)):
                found["/".join(parts[:depth])] = None
        return (self / name for name in found)

    def stat(self) -> _Stat:
        file = self.handle()
        return _Stat(file.nbytes, file.identity[-1])

    def handle(self) -> RemoteFile:
        """Open it; OSError if it is not there."""
        if not self.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return RemoteFile(self.tree, self._relative)

    def open(self, mode: str = "rb") -> IO[bytes]:
        assert mode == "rb", "nothing remote is written through its path"
        return io.BufferedReader(_Raw(self.handle()), PAGE)

    def read_bytes(self) -> bytes:
        """All of a small file."""
        file = self.handle()
        if file.nbytes > MAX_SMALL:
            raise SourceError(f"{self}: {file.nbytes} bytes; at most {MAX_SMALL} are read whole")
        return file.read_at(file.nbytes, 0)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)


def remote(path: object) -> RemotePath | None:
    """`path` if it is remote."""
    return path if isinstance(path, RemotePath) else None


def memory_ahead(source: object) -> int:
    """Bytes of weights that a source holds beside those of running steps: none unless it is read remotely."""
    return MEMORY if remote(getattr(source, "root", None)) else 0


@overload
def as_path(model: str | Path) -> Path: ...


@overload
def as_path(model: object) -> Path | None: ...


def as_path(model: object) -> Path | None:
    """A directory or file, local or remote; None if `model` is neither.

    The type says `Path`, because `RemotePath` has all that readers use of it.
    """
    if isinstance(model, RemotePath):
        return cast(Path, model)
    return Path(model).expanduser() if isinstance(model, str | Path) else None
