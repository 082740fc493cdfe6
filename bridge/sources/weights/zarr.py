"""The zarr backend of NeMo 1 and older Megatron-Core."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.files.span import Extent, Folder, Span, row_order
from bridge.core.formats.torch_pickle import integers
from bridge.core.text import described, fold_problems, named
from bridge.core.values import TensorSpec, shape_problem
from bridge.sources.weights.containers import Tile, TiledTensor, TiledTensors, training

MAX_CHUNKS = 1 << 20
MAX_ABSENT = 100  # missing chunks that are looked for: a header may promise a million of them


class Zarr(TiledTensors):
    """The tensors of one checkpoint; training state has its own folders, objects (`..._extra_state/`) stay closed."""

    def __init__(self, folder: Folder) -> None:
        objects = {name.removesuffix(".pt"): span for name, span in folder.files.items() if "_extra_state/" in name}
        below: dict[str, dict[str, Span]] = {}
        for path, span in folder.files.items():
            key, _, file = path.rpartition("/")
            below.setdefault(key, {})[file] = span
        names = (name for name, found in below.items() if ".zarray" in found and not training(name))
        super().__init__(folder.where, names, lambda name: _tensor(name, below[name]))
        self.files = (*objects.values(), *(span for name in self.specs for span in below[name].values()))
        self.objects = tuple(objects)


def _tensor(name: str, files: Mapping[str, Span]) -> TiledTensor:
    header = files[".zarray"].json()
    shape, chunk = integers(header.get("shape"), "shape"), integers(header.get("chunks"), "chunks")
    dtype = _dtype(header.get("dtype"))
    if problem := shape_problem(shape) or shape_problem(chunk):
        raise SourceError(problem)
    if (version := header.get("zarr_format")) != 2:
        raise SourceError(f"zarr_format is {described(version)}; only 2 is read, which Megatron-Core writes")
    for key in ("compressor", "filters"):
        if header.get(key):
            raise SourceError(f"stored with {key} {str(header[key])[:80]}; save it without, as Megatron-Core does")
    if (order := header.get("order", "C")) != "C":
        raise SourceError(f"stored in order {str(order)[:8]!r}; save it in order 'C', as Megatron-Core does")
    if len(chunk) != len(shape) or 0 in chunk:
        raise SourceError(f"chunks {chunk} do not fit shape {shape}; copy the checkpoint again")
    grid = [-(-n // step) for n, step in zip(shape, chunk, strict=True)]
    if math.prod(grid) > MAX_CHUNKS:
        raise SourceError(f"{math.prod(grid)} chunks; at most {MAX_CHUNKS} are supported")
    separator = str(header.get("dimension_separator", "."))
    parts, absent, wrong = [], [], []
    for index in itertools.product(*(range(n) for n in grid)):
        file = separator.join(map(str, index)) or "0"
        span = files.get(file)
        if span is None:
            absent.append(file)
            if len(absent) > MAX_ABSENT:
                break
            continue
        # Chunks at the edge are stored whole; values beyond the tensor are filler.
        if span.nbytes != math.prod(chunk) * DTYPES[dtype].bits // 8:
            wrong.append((file, f"{span.nbytes} bytes, not the {math.prod(chunk) * DTYPES[dtype].bits // 8}"))
            continue
        offsets = tuple(i * step for i, step in zip(index, chunk, strict=True))
        box = tuple(min(step, n - at) for at, step, n in zip(offsets, chunk, shape, strict=True))
        extent = Extent(span, 0, dtype, box, row_order(chunk))
        parts.append(Tile(offsets, box, extent.read_flat, extent.place))
    if absent:
        more = " and others" if len(absent) > MAX_ABSENT else ""
        filled = header.get("fill_value")
        means = "" if filled is None else f", which zarr reads as {described(filled)}, and Megatron-Core writes whole"
        raise SourceError(f"chunks {named(absent)}{more} are missing{means}; copy the checkpoint again")
    if wrong:
        whys = fold_problems((file, f"{nbytes} of {chunk} in {dtype}") for file, nbytes in wrong)
        raise SourceError(f"chunks {'; '.join(whys)}; copy the checkpoint again")
    return TiledTensor(TensorSpec(name, shape, dtype), parts)


def _dtype(code: object) -> str:
    """Translate `<f4`; Megatron's writer adds "bfloat16" to the format."""
    dtype = "bfloat16" if code == "bfloat16" else ""
    if isinstance(code, str) and not dtype and not code.startswith(">"):
        with contextlib.suppress(TypeError, ValueError, SyntaxError):
            dtype = np.dtype(code).name
    if dtype not in DTYPES:
        raise SourceError(f"dtype {str(code)[:20]!r} is not supported")
    return dtype
