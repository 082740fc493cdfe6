"""A restricted unpickler: names are looked up in a table; it never imports, calls or builds what a file names.

What a name may become is said by the caller's `Table`: weights, the index of a distributed checkpoint, or inert
records. The pure Python unpickler is subclassed, because the C one allocates memory for any memo index a file asks
for and takes extension codes from `copyreg`'s cache without asking `find_class`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, NoReturn

from bridge.dtypes import DTYPES
from bridge.errors import SourceError

DEEPEST = 8  # tuples within tuples that may be a key: hashing recurses in C, where a million of them end the process
LONGEST = 256 << 20  # bytes of a pickle; the largest of state dicts seen are some tens of megabytes
MADE = 256 << 20  # bytes of objects that one may make, roughly, of which one byte makes 200; 100,000 weights: 130 MB
# What a small file may make, and what each of its bytes may: an index of a distributed checkpoint makes 25 to 30 bytes
# of objects of each, and a file of nothing but opcodes that make empty sets 224.
LEAST, PER_BYTE = 16 << 20, 48
_ANOTHER = "save the model's tensors alone, as safetensors"


class Sealed:
    """Refuses the BUILD opcode, which would otherwise write into a checked record or into the table itself."""

    def __setstate__(self, state: object) -> NoReturn:
        raise SourceError("the pickle tries to change a record after it was checked")


@dataclass(frozen=True)
class Kind(Sealed):
    """A dtype or storage class: a word, not a thing to call."""

    dtype: str


@dataclass(frozen=True)
class Storage(Sealed):
    """A block of bytes of the file; `dtype` is "" where the tensors on it say their own."""

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
    """What each name of a pickle becomes. `refusal` ends the sentence "the pickle asks for os.system, ".

    `most`: bytes of objects that the pickle may make.
    """

    names: Mapping[tuple[str, str], object]
    refusal: str
    most: int = MADE


class Bounded:
    """A stream that gives `LONGEST` bytes, so that a length in the file cannot make us allocate it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._left = stream, LONGEST

    @property
    def taken(self) -> int:
        """Bytes that were read."""
        return LONGEST - self._left

    def read(self, n: int = -1) -> bytes:
        if not 0 <= n <= self._left:
            raise SourceError(f"the pickle asks for {n} bytes at once or is longer than {LONGEST}; {_ANOTHER}")
        self._left -= n
        return self._stream.read(n)

    def readline(self) -> bytes:
        line = self._stream.readline(min(1 << 16, self._left))
        self._left -= len(line)
        return line

    def readinto(self, buffer: Any) -> int:
        raise SourceError("the pickle uses out-of-band buffers")


def shown(value: object) -> str:
    """A value of a pickle as messages have it: what is nested may be too deep to be printed, and a number too long."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return str(value)[:80] if isinstance(value, int | float | str) else f"a {type(value).__name__}"


def key(value: Any, depth: int = 0) -> Any:
    """Return what may be hashed as it is; SourceError where hashing would recurse without end."""
    if isinstance(value, tuple | frozenset):
        if depth >= DEEPEST:
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
        """Count what is about to be made; SourceError where that is too much for the bytes read so far."""
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
            raise SourceError(f"the pickle refers to a {type(pid).__name__} outside itself, which is no storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        key = str(key) if type(key) is int and 0 <= key < 1 << 32 else key  # the savers of Lightning and litgpt count
        if not isinstance(kind, Kind) or not isinstance(key, str) or type(numel) is not int or not 0 <= numel < 1 << 60:
            raise SourceError(f"the pickle describes storage {shown(key)!r} wrongly")
        if len(pid) == 6 and pid[5] is not None:
            raise SourceError("views of storages (torch < 0.4) are not supported; save the file again")
        found = self.storages.setdefault(key, Storage(key, kind.dtype, numel))
        if (found.dtype, found.numel) != (kind.dtype, numel):
            raise SourceError(f"storage {key} is described twice, differently")
        return found


def _set_item(self: Any) -> None:
    value, name = self.stack.pop(), key(self.stack.pop())
    self.stack[-1][name] = value


def _set_items(self: Any) -> None:
    items = self.pop_mark()
    held = self.stack[-1]
    for name, value in zip(items[::2], items[1::2], strict=True):
        held[key(name)] = value


def _add_items(self: Any) -> None:
    items = self.pop_mark()
    held = self.stack[-1]
    if type(held) is not set:
        raise SourceError("the pickle adds to what is no set")
    held.update(map(key, items))


def _frozen(self: Any) -> None:
    self.append(frozenset(map(key, self.pop_mark())))


def _refuse_bytearray(self: Any) -> NoReturn:
    raise SourceError("the pickle holds a bytearray, which checkpoints never do")


# `bytearray(n)` allocates before it reads: the one opcode that the bounded stream does not see.
_Unpickler.dispatch[pickle.BYTEARRAY8[0]] = _refuse_bytearray
_Unpickler.dispatch[pickle.SETITEM[0]] = _set_item
_Unpickler.dispatch[pickle.SETITEMS[0]] = _set_items
_Unpickler.dispatch[pickle.ADDITEMS[0]] = _add_items
_Unpickler.dispatch[pickle.FROZENSET[0]] = _frozen


def _counted(load: Callable[[Any], None], nbytes: int) -> Callable[[Any], None]:
    """Count what an opcode makes before it does."""

    def counted(self: Any) -> None:
        self.count(nbytes)
        load(self)

    return counted


# What an opcode of a byte or two makes, with its place on the stack or in the memo; others make what they bring.
for _opcode, _nbytes in {
    pickle.MARK: 64, pickle.EMPTY_LIST: 64, pickle.EMPTY_DICT: 72, pickle.EMPTY_SET: 224, pickle.FROZENSET: 224,
    pickle.SETITEM: 64, pickle.SETITEMS: 160, pickle.TUPLE: 40, pickle.LIST: 56, pickle.DICT: 64,
    pickle.TUPLE1: 56, pickle.TUPLE2: 64, pickle.TUPLE3: 72, pickle.NEWOBJ: 128, pickle.REDUCE: 128,
    pickle.BINPUT: 96, pickle.LONG_BINPUT: 96, pickle.MEMOIZE: 96,
}.items():  # fmt: skip
    _Unpickler.dispatch[_opcode[0]] = _counted(_Unpickler.dispatch[_opcode[0]], _nbytes)


def load_stream(stream: Bounded, table: Table) -> tuple[Any, dict[str, Storage]]:
    """Unpickle one object from `stream`; return it and the storages it names. Whatever goes wrong is a SourceError."""
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
    """Unpickle the one object that `data` must be, to its last byte."""
    stream = io.BytesIO(data)
    found = load_stream(Bounded(stream), table)
    if stream.tell() != len(data):
        raise SourceError(f"{len(data) - stream.tell()} bytes follow the end of the pickle")
    return found
