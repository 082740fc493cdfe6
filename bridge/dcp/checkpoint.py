"""A written distributed checkpoint, read back under the names that the plan has, by the reader of foreign ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from bridge.dcp.index import slab_of
from bridge.dtypes import DTYPES
from bridge.errors import SourceError
from bridge.sources.archive import open_folder
from bridge.sources.dcp import Dcp
from bridge.values import TensorSpec


class Checkpoint:
    """Tensors of a directory. `specs`: those of `planned` that are there with the shape and dtype of the plan."""

    def __init__(self, directory: Path, planned: Iterable[TensorSpec]) -> None:
        self._dcp = Dcp(open_folder(directory))
        self.specs: Mapping[str, TensorSpec] = {spec.name: spec for spec in planned if self._holds(spec)}

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor."""
        spec = self.specs[name]
        out = np.empty(spec.nbytes, np.uint8)
        return self.read_bytes(name, 0, spec.nbytes, out).view(DTYPES[spec.dtype].storage).reshape(spec.shape)

    def read_bytes(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Return bytes `begin` to `end` of one tensor, in `out`."""
        spec, slab = self.specs[name], slab_of(name)
        flat = out.view(DTYPES[spec.dtype].storage)
        first = slab.number * spec.size + begin // flat.itemsize
        self._dcp.read_flat(slab.whole, first, first + len(flat), flat)
        return out

    def damaged(self) -> list[str]:
        """Open every item and say which differ from what the index says of them."""
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
        found = self._dcp.specs.get(slab.whole)
        return found is not None and (found.shape, found.dtype) == (slab.of(spec.shape), spec.dtype)
