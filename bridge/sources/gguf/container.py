"""Tensors of GGUF files; blocks are decoded as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.formats.gguf import COMPUTED, GgufFile, block_of
from bridge.core.text import named
from bridge.core.values import TensorSpec
from bridge.quant.codec.ggml_values import KINDS, values

PIECE = 1 << 20  # bytes of values that are decoded at once
_NOT_READ = "nvfp4"


class GgufTensors:
    """See `bridge.sources.weights.containers.Container`."""

    objects: tuple[str, ...] = ()

    def __init__(self, files: Sequence[GgufFile]) -> None:
        self._holder: dict[str, GgufFile] = {}
        for file in files:
            for name, spec in file.specs.items():
                if name in self._holder:
                    raise SourceError(f"{file.path}: holds {name}, which {self._holder[name].path.name} holds as well")
                if spec.dtype == _NOT_READ:
                    raise SourceError(
                        f"{file.path}: {name} is NVFP4 of llama.cpp, which is not read; give the checkpoint that it "
                        "was made from"
                    )
                self._holder[name] = file
        self.stored: Mapping[str, str] = {name: file.specs[name].dtype for name, file in self._holder.items()}
        self.skipped: Mapping[str, int] = {}
        self.files = tuple(file.span for file in files)
        self.specs: Mapping[str, TensorSpec] = {
            name: self._spec(file.specs[name]) for name, file in self._holder.items() if name not in COMPUTED
        }
        if wrong := [spec.name for spec in self.specs.values() if not DTYPES[spec.dtype].floating]:
            raise SourceError(f"{files[0].path}: {named(wrong)}: whole numbers, where weights should be")

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """See `Container`; a run of elements may begin inside a block."""
        file, kind = self._holder[name], self.stored[name]
        if kind not in KINDS:
            return file.read_bytes(name, begin * out.itemsize, end * out.itemsize, out)
        flat = out if out.ndim == 1 else out.reshape(-1) if out.flags.c_contiguous else np.empty(end - begin, out.dtype)
        block, size = block_of(kind)
        step = max(1, PIECE // (block * out.itemsize))
        for first in range(begin // block, -(-end // block), step):
            last = min(first + step, -(-end // block))
            stored = file.read_bytes(name, first * size, last * size, np.empty((last - first, size), np.uint8))
            decoded = values(stored, kind).reshape(-1)
            low, high = max(begin, first * block), min(end, last * block)
            flat[low - begin : high - begin] = decoded[low - first * block : high - first * block]
        if out.ndim > 1 and not out.flags.c_contiguous:
            out[...] = flat.reshape(out.shape)
        return out

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        file = self._holder[name]
        return str(file.path), file.offsets[name] + file.nbytes(name, begin)

    def _spec(self, spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype="float32") if spec.dtype in KINDS else spec
