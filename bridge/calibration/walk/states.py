"""Keep activations between blocks in files where memory is small.

A tensor moves in place: whoever holds it goes on with a mapping of a file. The file has no name, so a run that is
killed leaves none, and the disk is free again when nothing holds the tensor any more.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from bridge.core.errors import UsageError, WriteError, reason
from bridge.core.machine import drop_pages, in_memory
from bridge.core.text import size

SMALL = 64 << 10  # bytes of a tensor that is not worth a mapping, of which a process may have 65,530


class Spill:
    """Files in `directory` for the tensors that do not fit into `share` bytes of memory; the first stay there."""

    def __init__(self, directory: Path, share: int) -> None:
        self._directory, self._share = directory, share
        # by the address of a storage, which no other gets while there is a reference
        self._resident: dict[int, tuple[Any, int]] = {}
        self._mapped: dict[int, tuple[Any, int]] = {}

    def keep(self, *values: Any) -> None:
        """Move the tensors in `values` to files, unless they have their share of memory or others use their storage."""
        self._resident, self._mapped = _living(self._resident), _living(self._mapped)
        for storage, tensors in _storages(values):
            address, count = storage._cdata, storage.nbytes()
            if count < SMALL or address in self._mapped or address in self._resident:
                continue
            if sum(used for _, used in self._resident.values()) + count <= self._share:
                self._resident[address] = _weak(storage), count
            elif torch._C._storage_Use_Count(address) == len(tensors) + 1:  # a view elsewhere would keep the memory
                mapped = self._written(storage)
                self._mapped[mapped._cdata] = _weak(mapped), count
                for tensor in tensors:
                    tensor.set_(mapped, tensor.storage_offset(), tensor.shape, tensor.stride())

    def release(self, *values: Any) -> None:
        """Drop the pages of files from memory: those that a process has read count as its own."""
        for storage, _ in _storages(values):
            if storage._cdata in self._mapped:
                drop_pages(storage.data_ptr(), storage.nbytes())

    def _written(self, storage: torch.UntypedStorage) -> Any:
        """Return a copy of a storage that is the mapping of a file."""
        rest = memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)
        try:
            with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
                while rest:
                    rest = rest[file.write(rest) :]
                mapped: Any = torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", True, storage.nbytes())
                return mapped
        except OSError as error:
            raise WriteError(
                f"{self._directory}: {reason(error)} while activations were kept there; free some, give memory= "
                "(--memory) enough to hold them, or fewer samples= (--samples)"
            ) from error


def spill_to(directory: Path | None, share: int, nbytes: int, more: int = 0) -> Spill:
    """Return a place for `nbytes` of activations, beside `directory`; UsageError if the disk has no room for them.

    None: the directory of temporary files. `more`: bytes that are written to `directory` itself.
    """
    wanted = (directory or Path(tempfile.gettempdir())).absolute()
    place = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    remedy = "give memory= (--memory) enough to hold them, fewer samples= (--samples), or"
    if in_memory(place):
        raise UsageError(
            f"{size(nbytes)} of activations do not fit into memory=, and {place} lies in memory, too; {remedy} "
            "partial= (TMPDIR) on a disk"
        )
    if (free := shutil.disk_usage(place).free) < nbytes + more:
        raise UsageError(
            f"{place} has {size(free)} free, and a calibration in so little memory keeps {size(nbytes + more)} "
            f"of activations there; {remedy} another disk"
        )
    return Spill(place, share)


def _weak(storage: torch.UntypedStorage) -> Any:
    return reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _living(kept: Mapping[int, tuple[Any, int]]) -> dict[int, tuple[Any, int]]:
    return {address: (ref, count) for address, (ref, count) in kept.items() if not ref.expired()}


def _storages(values: Any) -> Iterator[tuple[torch.UntypedStorage, list[torch.Tensor]]]:
    """Yield the storages in host memory of the tensors in a value, with these."""
    found: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
    for tensor in {id(tensor): tensor for tensor in _tensors(values)}.values():
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (storage, []))[1].append(tensor)
    yield from found.values()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        yield value
        if value._base is not None:  # a view holds what it is a view of
            yield value._base
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
