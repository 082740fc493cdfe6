"""Write pickles as torch does, without importing what they name.

They are written opcode by opcode.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """A class, a function or a constant of a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The result of `function` when the pickle is loaded."""

    function: Name
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class New:
    """An instance made without its constructor, with its state; None for no state."""

    kind: Name
    state: Any = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """A reference to a storage outside the pickle."""

    key: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict of any keys, whose items are generated while they are written."""

    items: Iterable[tuple[Any, Any]]


def pickled(value: Any) -> bytes:
    """Return the pickle of these classes and plain data: protocol 2, the bytes of Python's own pickler.

    >>> pickled([None]).hex()
    '80025d71004e612e'
    """
    writer = _Writer()
    writer.write(value)
    return bytes(writer.out + b".")


class _Writer:
    """Numbers the objects that it writes, and refers to known names by number: an index has a hundred thousand."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self._count = 0
        self._known: dict[str | Name, int] = {}

    def write(self, value: Any) -> None:
        match value:
            case None:
                self.out += b"N"
            case bool():
                self.out += b"\x88" if value else b"\x89"
            case int():
                self.out += _integer(value)
            case float():
                self.out += b"G" + struct.pack(">d", value)
            case str():
                self._word(value, b"X" + struct.pack("<I", len(value.encode())) + value.encode())
            case Name():
                self._word(value, f"c{value.module}\n{value.name}\n".encode())
            case Persistent():
                self.write(value.key)
                self.out += b"Q"
            case Call():
                self.write(value.function)
                self.write(value.arguments)
                self._made(b"R")
            case New():
                self._new(value)
            case tuple():
                self._tuple(value)
            case list():
                self._made(b"]")
                self._several(((part,) for part in value), b"a", b"e")
            case Mapping():
                self.write(Pairs(value.items()))
            case Pairs():
                self._made(b"}")
                self._several(value.items, b"s", b"u")
            case _:
                raise TypeError(f"{type(value).__name__} cannot be written to a checkpoint's index")

    def _made(self, opcode: bytes) -> None:
        """Write the opcode that makes an object, and number the object."""
        number = b"q" + bytes([self._count]) if self._count < 256 else b"r" + struct.pack("<I", self._count)
        self.out += opcode + number
        self._count += 1

    def _word(self, word: str | Name, opcode: bytes) -> None:
        at = self._known.get(word)
        if at is None:
            self._known[word] = self._count
            self._made(opcode)
        else:
            self.out += b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at)

    def _new(self, value: New) -> None:
        self.write(value.kind)
        self._made(b")\x81")
        if value.state is not None:
            self.write(value.state)
            self.out += b"b"

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) > 3:
            self.out += b"("
        for part in value:
            self.write(part)
        if value:
            self._made(b"t" if len(value) > 3 else bytes([0x84 + len(value)]))
        else:
            self.out += b")"

    def _several(self, items: Iterable[tuple[Any, ...]], one: bytes, many: bytes) -> None:
        """Add items to the last container, a thousand at once."""
        rest = iter(items)
        while batch := list(itertools.islice(rest, 1000)):
            if len(batch) > 1:
                self.out += b"("
            for part in itertools.chain.from_iterable(batch):
                self.write(part)
            self.out += many if len(batch) > 1 else one


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
