"""The zarr backend of NeMo 1 and older Megatron-Core: a folder a tensor, a plain file a chunk; reads them in place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from bridge.dtypes import DTYPES
from bridge.errors import SourceError
from bridge.sources.dcp_metadata import training
from bridge.sources.native import Part, Tiled
from bridge.sources.shards import listed, named, natural
from bridge.sources.span import Extent, Folder, Span, row_order
from bridge.sources.stored_tensor import integers
from bridge.values import TensorSpec, shape_problem

MOST_CHUNKS = 1 << 20
MOST_ABSENT = 100  # chunks that are looked for in vain: a header may promise a million of them


class Zarr:
    """The tensors of one checkpoint; training state has folders of its own, which are none of its files.

    `objects`: what is no tensor (`..._extra_state/shard_0_2.pt`), which is not opened.
    """

    def __init__(self, folder: Folder) -> None:
        self._tensors: dict[str, Tiled] = {}
        self.skipped: Mapping[str, int] = {}
        wrong: dict[str, list[str]] = {}
        objects = {name.removesuffix(".pt"): span for name, span in folder.files.items() if "_extra_state/" in name}
        files = list(objects.values())
        below: dict[str, dict[str, Span]] = {}
        for path, span in folder.files.items():
            key, _, file = path.rpartition("/")
            below.setdefault(key, {})[file] = span
        for name in sorted((name for name, found in below.items() if ".zarray" in found), key=natural):
            if training(name):
                continue
            try:
                self._tensors[name] = _tensor(name, below[name])
                files += below[name].values()
            except SourceError as error:
                wrong.setdefault(str(error), []).append(name)
        problems = [f"{named(names)}: {why}" for why, names in wrong.items()]
        if problems:
            raise listed(folder.where, problems)
        self.files = tuple(files)
        self.objects = tuple(objects)
        self.specs: Mapping[str, TensorSpec] = {name: tensor.spec for name, tensor in self._tensors.items()}

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with elements `begin` to `end` of one tensor."""
        return self._tensors[name].read_flat(begin, end, out)

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        """File and offset of element `begin`."""
        return self._tensors[name].place(begin)


def _tensor(name: str, files: Mapping[str, Span]) -> Tiled:
    header = files[".zarray"].json()
    shape, chunk = integers(header.get("shape"), "shape"), integers(header.get("chunks"), "chunks")
    dtype = _dtype(header.get("dtype"))
    if problem := shape_problem(shape) or shape_problem(chunk):
        raise SourceError(problem)
    if header.get("zarr_format") != 2 or header.get("compressor") or header.get("filters"):
        raise SourceError("not a plain zarr 2 array: compressed, filtered, or of another version")
    if header.get("order", "C") != "C" or len(chunk) != len(shape) or 0 in chunk:
        raise SourceError(f"chunks {chunk} of shape {shape} in order {str(header.get('order'))[:8]!r}: not supported")
    grid = [-(-n // step) for n, step in zip(shape, chunk, strict=True)]
    if math.prod(grid) > MOST_CHUNKS:
        raise SourceError(f"{math.prod(grid)} chunks; at most {MOST_CHUNKS} are supported")
    separator = str(header.get("dimension_separator", "."))
    parts, absent, wrong = [], [], []
    for index in itertools.product(*(range(n) for n in grid)):
        file = separator.join(map(str, index)) or "0"
        span = files.get(file)
        if span is None:
            absent.append(file)
            if len(absent) > MOST_ABSENT:
                break
            continue
        # Chunks at the edge are stored whole; what lies beyond the tensor is filler.
        if span.nbytes != math.prod(chunk) * DTYPES[dtype].bits // 8:
            wrong.append(file)
            continue
        offsets = tuple(i * step for i, step in zip(index, chunk, strict=True))
        box = tuple(min(step, n - at) for at, step, n in zip(offsets, chunk, shape, strict=True))
        extent = Extent(span, 0, dtype, box, row_order(chunk))
        parts.append(Part(offsets, box, extent.read_flat, extent.place))
    if absent:
        more = " and others" if len(absent) > MOST_ABSENT else ""
        raise SourceError(f"chunks {named(absent)}{more} are missing; copy the checkpoint again")
    if wrong:
        raise SourceError(f"chunks {named(wrong)} are not {chunk} of {dtype}: truncated? copy the checkpoint again")
    return Tiled(TensorSpec(name, shape, dtype), parts)


def _dtype(code: object) -> str:
    """Translate `<f4`; "bfloat16" is what Megatron's writer adds to the format."""
    try:
        found = "bfloat16" if code == "bfloat16" else np.dtype(code).name if isinstance(code, str) else ""
    except (TypeError, ValueError, SyntaxError):
        found = ""
    if found not in DTYPES or (isinstance(code, str) and code.startswith(">")):
        raise SourceError(f"dtype {str(code)[:20]!r} is not supported")
    return found
