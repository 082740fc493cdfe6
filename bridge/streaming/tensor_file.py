"""One file of tensors under construction, written in any order.

Its layout is known before its first byte. The suffix of its name decides the format: `.distcp` holds items of a
distributed checkpoint, `.gguf` is GGUF, everything else is safetensors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import WriteError
from bridge.core.formats import gguf
from bridge.core.formats.safetensors import layout
from bridge.core.output.names import DISTCP, GGUF
from bridge.core.values import TensorSpec


class TensorFile:
    """Creates the file with its header and takes bytes of tensors; threads, and processes, may write at once."""

    def __init__(
        self, path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, Any], align: int, *, create: bool = True
    ) -> None:
        """Write everything except the tensors and reserve all bytes, so that a full disk is found before the work.

        create: False for a process that joins a run, whose file exists. Reserving twice may lose data: if a file system
        cannot reserve, the C library writes a zero into each block.
        """
        self.specs = {spec.name: spec for spec in specs}
        self._path = path
        around, self.offsets, size = _laid_out(self.specs.values(), metadata, align, path.suffix)
        if create:
            with _opened(path, os.O_CREAT) as fd:
                _reserve(fd, size)
                for at, data in around:
                    _write(fd, memoryview(data), at)

    def write(self, name: str, array: np.ndarray, at: int = 0) -> None:
        """Write C-contiguous storage into tensor `name`, from its byte `at` on."""
        data = memoryview(array.reshape(-1).view(np.uint8).data)
        size = self.specs[name].nbytes
        if at + len(data) > size:
            raise WriteError(f"{name}: {len(data)} bytes at {at} do not fit the {size} bytes of the plan")
        with _opened(self._path) as fd:
            _write(fd, data, self.offsets[name] + at)


def _laid_out(
    specs: Iterable[TensorSpec], metadata: Mapping[str, Any], align: int, suffix: str
) -> tuple[list[tuple[int, bytes]], dict[str, int], int]:
    """The bytes around the tensors with their offsets, the offset of each tensor, and the size of the file."""
    if suffix != DISTCP:
        header, offsets, size = (gguf.layout if suffix == GGUF else layout)(specs, metadata, align)
        return [(0, header)], offsets, size
    from bridge.core.formats.dcp_items import laid_out

    around: list[tuple[int, bytes]] = []
    offsets, size = {}, 0
    for spec, at, item in laid_out(specs):
        offsets[spec.name] = at + len(item.head)
        size = at + item.length
        around += [(at, item.head), (size - len(item.tail), item.tail)]
    return around, offsets, size


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Open for every piece: a process may not keep all shards of a checkpoint open, and opening takes microseconds."""
    fd = os.open(path, os.O_WRONLY | flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def _write(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


def _reserve(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)  # some network file systems reserve nothing
