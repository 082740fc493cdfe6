"""A restricted unpickler that imports and calls nothing that a file names.

The caller's `Table` says what a name becomes: weights, the index of a distributed checkpoint, or inert records. The
pure Python unpickler is subclassed, because the C one allocates memory for any memo index of a file and takes extension
codes from `copyreg`'s cache without calling `find_class`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, NoReturn

from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError

_MODULES = (
    "os", "posix", "nt", "pty", "subprocess", "shutil", "sys", "importlib", "runpy", "code", "codeop", "ctypes",
    "webbrowser", "timeit", "pdb", "bdb", "commands",
)  # fmt: skip
_BUILTINS = ("eval", "exec", "compile", "__import__", "open", "input", "breakpoint")
REFUSAL = "by which a file can run programs; nothing was run. Load it only if you trust who made it"

MAX_DEPTH = 8  # tuples within tuples that may be a key: hashing recurses in C, where a million of them end the process
MAX_PICKLE = 256 << 20  # bytes of a pickle; the largest of state dicts seen are some tens of megabytes
MAX_OBJECTS = 256 << 20  # bytes of objects that a pickle may make; one byte can make 200, 100,000 weights take 130 MB
# Objects that a small file may make, and that each further byte may: an index of a distributed checkpoint makes 25 to
# 30 bytes of objects per byte, a file of opcodes that make empty sets 224.
LEAST, PER_BYTE = 16 << 20, 48
_ANOTHER = "save the model's tensors alone, as safetensors"


class Sealed:
    """Refuses the BUILD opcode, which would otherwise write into a checked record or the table itself."""

    def __setstate__(self, state: object) -> NoReturn:
        raise SourceError("the pickle tries to change a record after it was checked")


@dataclass(frozen=True)
class Kind(Sealed):
    """A dtype or storage class: a word, not a thing to call."""

    dtype: str


@dataclass(frozen=True)
class Storage(Sealed):
    """A block of bytes of the file; `dtype` is "" if its tensors have their own."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * (DTYPES[self.dtype].bits // 8 if self.dtype else 1)


@dataclass(frozen=True)
class Call(Sealed):
    """A table value that may be called. A plain function would not do: BUILD sets attributes on those."""

    make: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)


@dataclass(frozen=True)
class Table:
    """Name of a pickle -> the object that it becomes. `refusal` ends the sentence "the pickle asks for os.system, ".

    `most`: bytes of objects that the pickle may make.
    """

    names: Mapping[tuple[str, str], object]
    refusal: str
    most: int = MAX_OBJECTS


class Bounded:
    """A stream of at most `MAX_PICKLE` bytes, so that a length in the file cannot make us allocate it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._left = stream, MAX_PICKLE

    @property
    def taken(self) -> int:
        """Bytes that were read."""
        return MAX_PICKLE - self._left

    def read(self, n: int = -1) -> bytes:
        if not 0 <= n <= self._left:
            raise SourceError(f"the pickle asks for {n} bytes at once or is longer than {MAX_PICKLE}; {_ANOTHER}")
        self._left -= n
        return self._stream.read(n)

    def readline(self) -> bytes:
        line = self._stream.readline(min(1 << 16, self._left))
        self._left -= len(line)
        return line

    def readinto(self, buffer: Any) -> int:
        raise SourceError("the pickle uses out-of-band buffers")


def shown(value: object) -> str:
    """Return a value of a pickle for a message; a nested one may be too deep to print, and a number too long."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return str(value)[:80] if isinstance(value, int | float | str) else f"a {type(value).__name__}"


def key(value: Any, depth: int = 0) -> Any:
    """Return a value that may be hashed; SourceError if hashing would recurse too deeply."""
    if isinstance(value, tuple | frozenset):
        if depth >= MAX_DEPTH:
            raise SourceError("the pickle has a key of tuples nested too deeply")
        for item in value:
            key(item, depth + 1)
    return value


class _Unpickler(pickle._Unpickler):
    """Looks names up in the table and storages in the file; everything else is refused by name."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: Bounded, table: Table) -> None:
        super().__init__(stream)
        self._table, self._bounded = table, stream
        self.made, self._allowed = 0, min(table.most, LEAST)
        self.storages: dict[str, Storage] = {}

    def count(self, nbytes: int) -> None:
        """Count new objects; SourceError if they are too many for the bytes read so far."""
        self.made += nbytes
        if self.made > self._allowed:
            self._allowed = min(self._table.most, LEAST + PER_BYTE * self._bounded.taken)
            if self.made > self._allowed:
                raise SourceError(f"the pickle makes more than {self._allowed >> 20} MB of objects; {_ANOTHER}")

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._table.names[module, name]
        except KeyError:
            raise SourceError(f"the pickle asks for {module}.{name}, {self._table.refusal}") from None

    def get_extension(self, code: int) -> NoReturn:
        raise SourceError(f"the pickle uses extension code {code}, which would bypass the table of allowed names")

    def persistent_load(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise SourceError(f"the pickle refers to a {type(pid).__name__} outside itself, which is not a storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        key = str(key) if type(key) is int and 0 <= key < 1 << 32 else key  # the savers of Lightning and litgpt count
        if not isinstance(kind, Kind) or not isinstance(key, str) or type(numel) is not int or not 0 <= numel < 1 << 60:
            raise SourceError(f"the pickle describes storage {shown(key)!r} wrongly")
        if len(pid) == 6 and pid[5] is not None:
            raise SourceError("views of storages (torch < 0.4) are not supported; save the file again")
        storage = self.storages.setdefault(key, Storage(key, kind.dtype, numel))
        if (storage.dtype, storage.numel) != (kind.dtype, numel):
            raise SourceError(f"storage {key} is described twice, differently")
        return storage


def _set_item(self: Any) -> None:
    value, name = self.stack.pop(), key(self.stack.pop())
    self.stack[-1][name] = value


def _set_items(self: Any) -> None:
    items = self.pop_mark()
    target = self.stack[-1]
    for name, value in zip(items[::2], items[1::2], strict=True):
        target[key(name)] = value


def _add_items(self: Any) -> None:
    items = self.pop_mark()
    target = self.stack[-1]
    if type(target) is not set:
        raise SourceError("the pickle adds items to an object that is not a set")
    target.update(map(key, items))


def _frozen(self: Any) -> None:
    self.append(frozenset(map(key, self.pop_mark())))


def _refuse_bytearray(self: Any) -> NoReturn:
    raise SourceError("the pickle holds a bytearray, whose opcode is not read; save it with torch.save's own protocol")


# `bytearray(n)` allocates before it reads: the one opcode that the bounded stream does not see.
_Unpickler.dispatch[pickle.BYTEARRAY8[0]] = _refuse_bytearray
_Unpickler.dispatch[pickle.SETITEM[0]] = _set_item
_Unpickler.dispatch[pickle.SETITEMS[0]] = _set_items
_Unpickler.dispatch[pickle.ADDITEMS[0]] = _add_items
_Unpickler.dispatch[pickle.FROZENSET[0]] = _frozen


def _counted(load: Callable[[Any], None], nbytes: int) -> Callable[[Any], None]:
    """Count the objects of an opcode before it makes them."""

    def counted(self: Any) -> None:
        self.count(nbytes)
        load(self)

    return counted


# Bytes that an opcode of one or two bytes makes, with its place on the stack or in the memo.
for _opcode, _nbytes in {
    pickle.MARK: 64, pickle.EMPTY_LIST: 64, pickle.EMPTY_DICT: 72, pickle.EMPTY_SET: 224, pickle.FROZENSET: 224,
    pickle.SETITEM: 64, pickle.SETITEMS: 160, pickle.TUPLE: 40, pickle.LIST: 56, pickle.DICT: 64,
    pickle.TUPLE1: 56, pickle.TUPLE2: 64, pickle.TUPLE3: 72, pickle.NEWOBJ: 128, pickle.REDUCE: 128,
    pickle.BINPUT: 96, pickle.LONG_BINPUT: 96, pickle.MEMOIZE: 96,
}.items():  # fmt: skip
    _Unpickler.dispatch[_opcode[0]] = _counted(_Unpickler.dispatch[_opcode[0]], _nbytes)


def load_stream(stream: Bounded, table: Table) -> tuple[Any, dict[str, Storage]]:
    """Unpickle one object from `stream`; return it and its storages. Every failure is a SourceError."""
    unpickler = _Unpickler(stream, table)
    try:
        return unpickler.load(), unpickler.storages
    except SourceError:
        raise
    except RecursionError as error:
        raise SourceError("the pickle is nested too deeply") from error
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise SourceError(f"the pickle is broken: {why}; copy the file again") from error


def load_bytes(data: bytes, table: Table) -> tuple[Any, dict[str, Storage]]:
    """Unpickle `data`, which must be one object to its last byte."""
    stream = io.BytesIO(data)
    loaded = load_stream(Bounded(stream), table)
    if stream.tell() != len(data):
        raise SourceError(f"{len(data) - stream.tell()} bytes follow the end of the pickle")
    return loaded


def runs_programs(name: str) -> bool:
    """Whether a dotted name is a function that runs programs.

    >>> runs_programs("posix.system"), runs_programs("builtins.eval"), runs_programs("argparse.Namespace")
    (True, True, False)
    """
    module, _, rest = name.partition(".")
    return rest in _BUILTINS if module in ("builtins", "__builtin__") else module in _MODULES
