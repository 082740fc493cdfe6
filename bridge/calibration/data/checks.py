"""Check batches against their model, and digest calibration data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CellType
from typing import Any

from bridge.calibration.data.values import Data
from bridge.core.errors import CalibrationError
from bridge.sources.configs.diffusion import PLACES
from bridge.sources.configs.positions import positions, vocabulary_size
from bridge.sources.source import Source


def checked(
    batches: tuple[dict[str, Any], ...], held_out: tuple[dict[str, Any], ...], source: Source, where: str
) -> Data:
    """Return the batches as data; CalibrationError if the model cannot read them. `where`: what they are."""
    vocabulary, longest = vocabulary_size(source.config), positions(source.config)
    for batch in (*batches, *held_out):
        for name, tensor in batch.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise CalibrationError(f"{where}: {name} holds NaN or infinity")
        ids = batch.get("input_ids")
        if ids is None:
            continue
        if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            raise CalibrationError(f"{where}: input_ids {ids.dtype} {tuple(ids.shape)}; expected ids [batch, sequence]")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            raise CalibrationError(
                f"{where}: ids reach from {low} to {high}, the model's vocabulary ends at {vocabulary}: "
                "is it the tokenizer of this model?"
            )
        if longest is not None and ids.shape[1] > longest:
            raise CalibrationError(f"{where}: rows of {ids.shape[1]} tokens, the model has {longest} positions")
    length = max((b["input_ids"].shape[1] for b in batches if "input_ids" in b), default=0)
    return Data(batches, held_out, digest_of(batches), sum(map(size, batches)), int(length), name=where)


def size(batch: Mapping[str, Any]) -> int:
    """The number of rows of a batch."""
    first = next((tensor for name, tensor in batch.items() if name not in PLACES), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1


def some_rows(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """Some rows of a batch, whole where a denoiser's positions are the same for all."""
    return {name: tensor if name in PLACES else tensor[rows] for name, tensor in batch.items()}


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
