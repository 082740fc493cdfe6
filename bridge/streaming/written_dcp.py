"""Read a written distributed checkpoint under the names of its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from bridge.core.arrays import aligned_empty
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.files.archive import open_folder
from bridge.core.formats.dcp_index import slab_of, whole
from bridge.core.text import fold_problems
from bridge.core.values import TensorSpec
from bridge.sources.weights.dcp import Dcp


class Checkpoint:
    """Tensors of a directory. `specs`: the planned tensors that it holds with the plan's shape and dtype."""

    def __init__(self, directory: Path, planned: Iterable[TensorSpec]) -> None:
        self._dcp, planned = Dcp(open_folder(directory)), tuple(planned)
        self._planned = whole(planned)
        self.specs: Mapping[str, TensorSpec] = {spec.name: spec for spec in planned if self._holds(spec)}

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor."""
        spec = self.specs[name]
        out = aligned_empty((spec.nbytes,), np.uint8)
        return self.read_bytes(name, 0, spec.nbytes, out).view(DTYPES[spec.dtype].storage).reshape(spec.shape)

    def read_bytes(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Return bytes `begin` to `end` of one tensor, in `out`."""
        spec, slab = self.specs[name], slab_of(name)
        flat = out.view(DTYPES[spec.dtype].storage)
        first = slab.number * spec.size + begin // flat.itemsize
        self._dcp.read_flat(slab.whole, first, first + len(flat), flat)
        return out

    def pieces(self, name: str, size: int, take: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the bytes of one tensor, `size` at a time, each in a buffer from `take`."""
        nbytes = self.specs[name].nbytes
        for begin in range(0, nbytes, size):
            end = min(begin + size, nbytes)
            yield self.read_bytes(name, begin, end, take(end - begin))

    def differing(self, objects: Iterable[str] = ()) -> list[str]:
        """Differences between the index and the plan, and `objects` (not tensors) that are missing; layers folded."""
        problems: list[tuple[str, str]] = []
        for name, spec in self._planned.items():
            stored = self._dcp.specs.get(name)
            if stored is None:
                problems.append((name, "is missing"))
            elif stored != spec:
                problems.append((name, f"is {stored.dtype} {stored.shape}, in the plan {spec.dtype} {spec.shape}"))
        states = dict.fromkeys(name.partition("/shard_")[0] for name in objects if name not in self._dcp.objects)
        problems += [(name, "is missing, or one of its shards") for name in states]
        problems += [(name, "is not in the plan") for name in self._dcp.specs if name not in self._planned]
        return fold_problems(problems)

    def damaged(self) -> list[str]:
        """Open every item; problems of those that differ from the index."""
        problems: dict[str, None] = {}
        for spec in self.specs.values():
            first = np.empty(DTYPES[spec.dtype].bits // 8, np.uint8)
            try:
                self.read_bytes(spec.name, 0, first.nbytes, first)
            except SourceError as error:
                problems[str(error)] = None
        for name in self._dcp.objects:
            try:
                self._dcp.open_object(name)
            except SourceError as error:
                problems[str(error)] = None
        return list(problems)

    def _holds(self, spec: TensorSpec) -> bool:
        slab = slab_of(spec.name)
        stored = self._dcp.specs.get(slab.whole)
        return stored is not None and (stored.shape, stored.dtype) == (slab.of(spec.shape), spec.dtype)
