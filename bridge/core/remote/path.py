"""A remote directory in the words of `pathlib`, so that readers need not know; never asks the network what is there.

It was listed once: names, sizes and tags of that moment hold for the whole run, and a file that differs later is an
error where it is read.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, cast, overload

from bridge.errors import SourceError, first_of
from bridge.remote.address import Look

if TYPE_CHECKING:
    from bridge.remote.blocks import Blocks
    from bridge.remote.client import Flow
    from bridge.remote.weights import WeightReader

HELD = 256 << 20  # bytes of blocks of weights: both passes over a matrix of that size fetch it once
PAGE = 64 << 10  # bytes a request where headers and indices are read, a few hundred bytes at once
PAGES = 8 << 20
MOST_SMALL = 1 << 30  # bytes of a file that is read whole: the largest tokenizers take some tens of megabytes


class Store(Protocol):
    """What lists and serves the files of one remote directory."""

    @property
    def where(self) -> str:
        """The directory as messages call it: no password, no signature."""

    @property
    def files(self) -> Mapping[str, Look]:
        """Relative name -> what the store said of the file."""

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file from `begin` on; SourceError where they are not to be had, or changed."""

    def flow(self, name: str, begin: int, end: int) -> Flow | None:
        """Bytes of a file, to be read in order; None where it can only be fetched."""

    def give_up(self) -> None:
        """Fail what is being fetched, and whatever is until `go_on`: nobody waits for it any more."""

    def go_on(self) -> None:
        """Fetch again as if nothing had been."""


def check_names(names: Iterable[str], where: str) -> None:
    """SourceError where files are named so that one written below a directory would lie elsewhere, or nowhere."""
    wrong = sorted(name for name in names if re.search(r"[\\\0]", name) or {"", ".", ".."} & {*name.split("/")})
    if wrong:
        raise SourceError(
            f"{where}: files are named {first_of([*map(repr, wrong)], 4)}; a name must not hold `..`, `.`, "
            "an empty part, a backslash or a zero byte: rename or remove them there"
        )


@dataclass(frozen=True)
class Tree:
    """A remote directory that is being read: `memory` is what its blocks may take, which a plan counts.

    `opened` stands for the tags of files whose store tells none: what was read of them is not gone on with later.
    """

    store: Store
    memory: int = HELD
    opened: str = field(default_factory=lambda: token_hex(16), repr=False)

    def __post_init__(self) -> None:
        check_names(self.store.files, self.store.where)
        for name, look in self.store.files.items():
            if type(look.nbytes) is not int or not 0 <= look.nbytes < 1 << 63:
                raise SourceError(
                    f"{self.store.where}/{name}: listed with {look.nbytes!r} bytes, which no file has; ask its server"
                )

    @cached_property
    def weights(self) -> WeightReader:
        """Straight, or in blocks that are asked for ahead: in these alone where they can hold all that is there."""
        from bridge.remote.blocks import Blocks  # what it imports takes longer than most local files to read
        from bridge.remote.weights import WeightReader

        few = sum(look.nbytes for look in self.store.files.values()) <= self.memory
        return WeightReader(None if few else self.store.flow, Blocks(self.store.fetch, self.memory), self.pages)

    @cached_property
    def pages(self) -> Blocks:
        """Of headers and indices: nothing more than was asked for."""
        from bridge.remote.blocks import Blocks

        return Blocks(self.store.fetch, PAGES, PAGE, connections=4, ahead=False)

    def give_up(self) -> None:
        """Let nobody wait for this directory until `go_on`."""
        self.store.give_up()
        self.weights.give_up()
        self.pages.give_up()

    def go_on(self) -> None:
        """Read again as if nothing had been."""
        self.store.go_on()
        self.weights.go_on()
        self.pages.go_on()


@dataclass(frozen=True)
class RemoteFile:
    """A file that is open for reading, in the place of a descriptor."""

    tree: Tree = field(repr=False)
    name: str

    @property
    def look(self) -> Look:
        return self.tree.store.files[self.name]

    @property
    def nbytes(self) -> int:
        return self.look.nbytes

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """What is another file, or was written since, where it differs: as `container.identity` of local ones."""
        look = self.look
        return 0, 0, look.nbytes, _number(look.tag or self.tree.opened)

    def read_into(self, out: memoryview, begin: int, end: int | None = None) -> int:
        """Fill `out` with weights, of which more are read next, up to `end`; returns how many bytes there were."""
        count = max(0, min(len(out), self.nbytes - begin))
        self.tree.weights.read(self.name, self.nbytes, begin, min(end, self.nbytes) if end else None, out[:count])
        return count

    def read_at(self, count: int, begin: int) -> bytes:
        """Bytes of a header or an index: fewer where the file ends before."""
        count = max(0, min(count, self.nbytes - begin))
        head = self.look.head
        if begin + count <= len(head):
            return head[begin : begin + count]
        out = bytearray(count)
        if count > PAGE:
            self.tree.store.fetch(self.name, begin, memoryview(out))
        else:
            self.tree.pages.read(self.name, self.nbytes, begin, memoryview(out))
        return bytes(out)


@lru_cache(maxsize=1024)  # asked for with each piece of a tensor
def _number(tag: str) -> int:
    """A tag as a number of 64 bits."""
    return int.from_bytes(sha256(tag.encode()).digest()[:8], "big")


Handle = int | RemoteFile  # a file that is open for reading: a descriptor where it is local


class _Raw(io.RawIOBase):
    """A remote file as a stream, for what reads streams: tar archives, pickles of old files."""

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

    def tell(self) -> int:
        return self._at


class _Stat(NamedTuple):
    """As much of `os.stat_result` as readers ask for; the time is a number that changes when the file does."""

    st_size: int
    st_mtime_ns: int


class RemotePath:
    """A file or directory of a tree; `relative` is "" for the tree's root, `str()` what messages call it."""

    def __init__(self, tree: Tree, relative: str = "") -> None:
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
        return RemotePath(self.tree, str(PurePosixPath(self._relative, name)))

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
        match = re.compile(translate(pattern)).match
        return (path for _, path in self.files() if match(path.name))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What matches a pattern without `**`; one that ends in `/` matches directories only."""
        parts = pattern.rstrip("/").split("/")
        matches = [re.compile(translate(part)).match for part in parts]
        found: dict[str, None] = {}
        for name, _ in self.files():
            have = name.split("/")
            directory = len(have) > len(parts)
            if len(have) < len(parts) or (pattern.endswith("/") and not directory):
                continue
            if all(match(part) for match, part in zip(matches, have, strict=False)):
                found["/".join(have[: len(parts)])] = None
        return (self / name for name in found)

    def stat(self) -> _Stat:
        file = self.handle()
        return _Stat(file.nbytes, file.identity[-1])

    def handle(self) -> RemoteFile:
        """Open it; OSError where it is not there."""
        if not self.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return RemoteFile(self.tree, self._relative)

    def open(self, mode: str = "rb") -> IO[bytes]:
        assert mode == "rb", "nothing remote is written through its path"
        return io.BufferedReader(_Raw(self.handle()), PAGE)

    def read_bytes(self) -> bytes:
        """All of a small file."""
        file = self.handle()
        if file.nbytes > MOST_SMALL:
            raise SourceError(f"{self}: {file.nbytes} bytes; at most {MOST_SMALL} are read whole")
        return file.read_at(file.nbytes, 0)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)


def remote(path: object) -> RemotePath | None:
    """`path` where it is remote, for the few who must know."""
    return path if isinstance(path, RemotePath) else None


def held_ahead(source: object) -> int:
    """Bytes of weights that a source holds beside those of running steps: none unless it is read remotely."""
    far = remote(getattr(source, "root", None))
    return far.tree.memory if far else 0


@overload
def as_path(model: str | Path) -> Path: ...


@overload
def as_path(model: object) -> Path | None: ...


def as_path(model: object) -> Path | None:
    """What readers take for a directory or file: a path, or a remote one that answers like it; None for what is none.

    The type says `Path`, because a reader uses nothing of it that `RemotePath` has not.
    """
    if isinstance(model, RemotePath):
        return cast(Path, model)
    return Path(model).expanduser() if isinstance(model, str | Path) else None
