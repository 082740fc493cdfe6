"""Digests of calibration data: of tensors, and of a caller's loop."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CellType
from typing import Any


def digest_of(batches: Iterable[Mapping[str, Any]]) -> str:
    """Digest of tensors and their names."""
    import torch

    digest = hashlib.sha256()
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def code_digest(function: Any) -> str:
    """Digest of a loop: its code, and what it closes over."""
    digest = hashlib.sha256(b"forward_loop")
    for part in _content(function, set()):
        digest.update(part)
    return digest.hexdigest()


def _content(value: Any, seen: set[int]) -> Iterator[bytes]:
    """Yield what distinguishes two loops: code, and the text, numbers and tensors in closures; else the type."""
    import numpy as np
    import torch

    if isinstance(value, str | bytes | int | float | Path | None):
        yield repr(value).encode()
        return
    kind = type(value)
    yield f" {getattr(value, '__qualname__', kind.__qualname__)} ".encode()
    if id(value) in seen:  # a function may close over itself
        return
    seen.add(id(value))
    inner: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield digest_of([{"": value.detach().cpu()}]).encode()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        inner = value
    elif code := getattr(value, "__code__", None):
        yield repr((code.co_code, [c for c in code.co_consts if isinstance(c, str | int | float)])).encode()
        cells = getattr(value, "__closure__", None) or ()
        contents = [cell.cell_contents for cell in cells if cell != CellType()]
        inner = [*contents, *(getattr(value, "__defaults__", None) or ())]
    elif isinstance(value, partial):
        inner = [value.func, value.args, value.keywords]
    elif isinstance(value, torch.utils.data.DataLoader):
        inner = [value.dataset]
    elif isinstance(value, torch.utils.data.TensorDataset):
        inner = value.tensors
    for part in inner:
        yield from _content(part, seen)
