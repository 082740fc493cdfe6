"""One digest for the tensors of a model or of a directory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from bridge.core.arrays import Buffers
from bridge.core.errors import SourceError
from bridge.core.formats.safetensors import SafetensorsFile

PIECE = 4 << 20  # bytes that are read at once


class Digest:
    """SHA-256 over the names, dtypes, shapes and bytes of tensors, sorted by name: files may have any order."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[memoryview]) -> None:
        """Add one tensor. `dtype`: its name in torch."""
        if name in self._lines:
            raise SourceError(f"{name}: is there twice; a digest is of tensors with different names")
        values = hashlib.sha256()
        for piece in pieces:
            values.update(piece)
        self._lines[name] = f"{name} {dtype} {list(shape)} {values.hexdigest()}\n"

    def hexdigest(self) -> str:
        return hashlib.sha256("".join(self._lines[name] for name in sorted(self._lines)).encode()).hexdigest()


def digest(directory: str | Path) -> str:
    """The digest of all safetensors files of a directory, as `bridge.tensors(...).digest()` gives it.

    >>> bridge.live.digest("examples/models/tiny-llama")[:16]
    '51a286c2d543789b'
    """
    if not Path(directory).is_dir():
        raise SourceError(f"{directory}: is no directory; give one that `convert` wrote for a server")
    paths = sorted(Path(directory).glob("*.safetensors"))
    if not paths:
        raise SourceError(f"{directory}: has no safetensors file; name a directory that `convert` wrote for a server")
    whole, buffers = Digest(), Buffers()
    for path in paths:
        file = SafetensorsFile(path)
        for name, spec in file.specs.items():
            pieces = (piece.reshape(-1).data for piece in file.pieces(name, PIECE, buffers.piece))
            whole.add(name, spec.dtype, spec.shape, pieces)
    return whole.hexdigest()
