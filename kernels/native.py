"""Call kernels as machine code.

An array goes as its address and its lengths.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np

from bridge._kernels.objects import LINKED, NAMES, digest, opened, stored, unpacked

POINTER, WORD = ctypes.c_void_p, ctypes.c_ssize_t
NUMBERS = {
    "int64": ctypes.c_int64, "uint32": ctypes.c_uint32, "uint8": ctypes.c_uint8, "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}  # fmt: skip
_LOCK = threading.Lock()


class Kernel:
    """A function of arrays and numbers, compiled when it is called first; it holds no lock of the interpreter."""

    def __init__(
        self,
        function: Callable[..., Any],
        signatures: Sequence[tuple[str, ...]],
        scratch: Callable[..., tuple[Any, ...]] | None,
    ) -> None:
        update_wrapper(self, function)
        digest(self._module)  # of the source that is imported now
        self.signatures, self._scratch = tuple(signatures), scratch
        self._overloads: list[_Overload] | None = None

    def __call__(self, *given: Any) -> None:
        if self._scratch:
            given = (*given, *self._scratch(*given))
        overloads = self._overloads or self.load()
        for overload in overloads:
            if overload.fits(given):
                overload(given)
                return
        raise TypeError(f"{self.__qualname__}{_told(given)}: compiled for {'; '.join(map(' '.join, self.signatures))}")

    @property
    def _module(self) -> str:
        return self.__module__.rpartition(".")[2]

    def load(self) -> list[_Overload]:
        """Load the machine code, which is compiled if this machine has none."""
        with _LOCK:
            if self._overloads is None:
                addresses = _addresses(self._module)
                name = self.__qualname__
                self._overloads = [_Overload(words, addresses[" ".join((name, *words))]) for words in self.signatures]
        return self._overloads


class _Overload:
    """A kernel for one signature."""

    def __init__(self, words: Sequence[str], address: int) -> None:
        self._arrays = [(at, *_array(word), word.endswith("=")) for at, word in enumerate(words) if "[" in word]
        self._count = len(words)
        kinds: list[Any] = [POINTER, POINTER]  # of the result, of an exception
        for word in words:
            kinds += [POINTER, *[WORD] * _array(word)[1]] if "[" in word else [NUMBERS[word]]
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(address)
        self._ends = ctypes.byref(POINTER()), ctypes.byref(POINTER())

    def fits(self, given: Sequence[Any]) -> bool:
        if len(given) != self._count:
            return False
        for at, dtype, ndim, written in self._arrays:
            array = given[at]
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
                return False
            flags = array.flags
            if not (flags.carray if written else flags.c_contiguous):  # `carray`: writable, too
                return False
        return True

    def __call__(self, given: Sequence[Any]) -> None:
        flat: list[Any] = [*self._ends]
        for value in given:
            if isinstance(value, np.ndarray):
                flat += (POINTER.from_address(id(value) + _DATA).value, *value.shape)
            else:
                flat.append(value)
        if self._call(*flat):
            raise ValueError(f"a kernel stopped, as its arrays do not fit each other: {_told(given)}")


@cache
def _addresses(module: str) -> dict[str, int]:
    path = stored(module)
    if path.suffix == LINKED:
        try:
            return load(path)
        except OSError:  # a file system that nothing is run from: object files are linked in memory
            path = stored(module, linked=False)
    return link(module, *unpacked(opened(path.read_bytes()) or b""))


def load(path: Path) -> dict[str, int]:
    """Load a shared library; returns where its kernels lie in memory, by name and signature."""
    library = ctypes.CDLL(str(path))
    names = json.loads(ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, NAMES))))
    return {name: ctypes.cast(library[symbol], POINTER).value or 0 for name, symbol in names.items()}


def link(module: str, names: dict[str, str], parts: list[bytes]) -> dict[str, int]:
    """Link and load object files, as `load`."""
    import llvmlite.binding as llvm

    builder = llvm.JITLibraryBuilder()
    for part in parts:
        builder.add_object_img(part)
    for symbol in names.values():
        builder.export_symbol(symbol)
    library = builder.link(_linker(), module)
    _LIBRARIES.append(library)
    return {name: library[symbol] for name, symbol in names.items()}


def _data_at() -> int:
    """Where in an array's object its address lies: NumPy's `ctypes.data` takes longer than a small kernel."""
    array = np.empty(1)
    places = range(0, sys.getsizeof(array) - array.nbytes, ctypes.sizeof(POINTER))
    return next(at for at in places if POINTER.from_address(id(array) + at).value == array.ctypes.data)


_DATA = _data_at()
_LIBRARIES: list[Any] = []  # machine code lives as long as these


@cache
def _linker() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler()


def _array(word: str) -> tuple[np.dtype[Any], int]:
    dtype, _, axes = word.rstrip("=").partition("[")
    return np.dtype(dtype), axes.count(":")


def _told(given: Sequence[Any]) -> str:
    told = (
        f"{a.dtype}{list(a.shape)}{'' if a.flags.writeable else ' read-only'}"
        if isinstance(a, np.ndarray)
        else type(a).__name__
        for a in given
    )
    return f"({', '.join(told)})"
