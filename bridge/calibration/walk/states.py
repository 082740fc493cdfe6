"""Keep activations between blocks in files where memory is small.

A tensor moves in place: whoever holds it goes on with a mapping of a file. The file has no name, so a run that is
killed leaves none, and the disk is free again when nothing holds the tensor any more.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from bridge.core.errors import UsageError, WriteError, reason
from bridge.core.machine import drop_pages, in_memory
from bridge.core.text import size
from bridge.tracker.tensors import tensors_in

HOLD = "give memory= (--memory) enough to hold them, fewer samples= (--samples), or"
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
        with (
            written(self._directory, "activations", HOLD),
            tempfile.TemporaryFile(dir=self._directory, buffering=0) as file,
        ):
            while rest:
                rest = rest[file.write(rest) :]
            mapped: Any = torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", True, storage.nbytes())
            return mapped


@contextmanager
def written(place: Path | None, what: str, remedy: str = "or") -> Iterator[None]:
    """Tell an error of the disk while `what` is kept in a directory; None: that of temporary files."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{place or tempfile.gettempdir()}: {reason(error)} while {what} were kept there; free some, {remedy} "
            "point partial= (TMPDIR) to another disk"
        ) from error


def spill_to(
    directory: Path | None,
    share: int,
    states: int,
    codes: int = 0,
    finished: int = 0,
    spare: int = 0,
    sharing: int = 1,
) -> Spill | None:
    """Return a place for bytes of activations, beside `directory`; UsageError if the disk has no room.

    None: the directory of temporary files. `states`: activations that do not fit into `share` bytes; None is returned
    without any. `codes`: chosen codes and scales; a file in memory is enough if `spare` holds them. `finished`: outputs
    of finished blocks. `sharing`: processes that write as much there.
    """
    wanted = (directory or Path(tempfile.gettempdir())).absolute()
    place = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    of_data = states + finished
    what = " and ".join(["activations"] * (of_data > 0) + ["chosen codes"] * (codes > 0))
    remedy = HOLD if of_data else "give memory= (--memory) enough for the whole model, or"
    if in_memory(place) and (states or codes > spare):
        raise UsageError(
            f"{size(states + codes)} of {what} do not fit into memory=, and {place} lies in memory, too; {remedy} "
            "partial= (TMPDIR) on a disk"
        )
    total = states + codes + finished
    there = sum(path.stat().st_size for path in wanted.iterdir()) if directory and place == wanted else 0
    if total and (free := shutil.disk_usage(place).free // sharing + there) < total:
        raise UsageError(
            f"{place} has {size(free)} free, and a calibration block by block keeps {size(total)} of {what} there; "
            f"{remedy} another disk"
        )
    return Spill(place, share) if states else None


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
    for tensor in tensors_in(value):
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided:
            yield tensor
            if tensor._base is not None:  # a view holds what it is a view of
                yield tensor._base
