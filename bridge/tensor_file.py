"""One file of tensors under construction: its layout is known before its first byte, its tensors come in any order.

The name says the format: items of a distributed checkpoint (`.distcp`), or else safetensors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bridge.container import layout
from bridge.dcp import DISTCP
from bridge.errors import WriteError
from bridge.values import TensorSpec


class TensorFile:
    """Creates the file with its header and takes bytes of tensors; threads may write at once."""

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str], align: int) -> None:
        """Write all but the tensors and reserve all bytes, so that a full disk is found before the work."""
        self.specs = {spec.name: spec for spec in specs}
        self.offsets: dict[str, int] = {}
        self._path = path
        with _opened(path, os.O_CREAT) as fd:
            if path.suffix == DISTCP:
                _reserve(fd, self._write_items(fd))
                return
            header, self.offsets, size = layout(self.specs.values(), metadata, align)
            _reserve(fd, size)
            _write(fd, memoryview(header), 0)

    def _write_items(self, fd: int) -> int:
        """Write what surrounds the tensors; return the size of the file."""
        from bridge.dcp.items import laid_out

        size = 0
        for spec, at, item in laid_out(self.specs.values()):
            self.offsets[spec.name] = at + len(item.head)
            _write(fd, memoryview(item.head), at)
            size = at + item.length
            _write(fd, memoryview(item.tail), size - len(item.tail))
        return size

    def write(self, name: str, array: np.ndarray, at: int = 0) -> None:
        """Write C-contiguous storage into tensor `name`, from byte `at` of it on."""
        data = memoryview(array.reshape(-1).view(np.uint8).data)
        size = self.specs[name].nbytes
        if at + len(data) > size:
            raise WriteError(f"{name}: {len(data)} bytes at {at} do not fit the {size} that the plan has")
        with _opened(self._path) as fd:
            _write(fd, data, self.offsets[name] + at)


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Opened for every piece: a checkpoint has more shards than a process may hold open, and it costs microseconds."""
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
