"""Merged values, by peft's operations in their order.

Factors are multiplied in float32, scaled, and added in the wider dtype of both; an embedding's and a parameter's
product is rounded to the dtype of the weight before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from bridge.sources.adapted.adapter import Adapter
from bridge.sources.adapted.match import Delta


@contextmanager
def one_thread(others: int) -> Iterator[None]:
    """Let torch use one thread in this one: the stream has its own, and waiting ones took half of the processor time.

    `others`: the number that torch has in the caller's process, which new threads get again.
    """
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(others)


def merge_rows(weight: Any, adapter: Adapter, delta: Delta, begin: int, end: int) -> None:
    """Merge stored rows `begin` to `end` in place; they are a block, or all."""
    a, b = adapter.tensor(delta.a), adapter.tensor(delta.b)
    dtype, a, b = b.dtype, a.float(), b.float()
    whole = (begin, end) == (0, delta.shape[0])
    if delta.kind in ("conv1d", "embedding"):
        change = (b @ (a if whole else a[:, begin:end])).T * delta.scaling
    else:
        change = (b if whole else b[begin:end]) @ a * delta.scaling
    _add(weight, change.to(dtype), adapter, delta, begin, end)


def merge_whole(weight: Any, adapter: Adapter, delta: Delta) -> None:
    """Merge a tensor whose rows do not stand for themselves, in place."""
    if delta.kind == "conv":
        return _add(weight, _convolved(adapter, delta), adapter, delta, 0, delta.shape[0])
    if delta.kind != "parameter":
        return merge_rows(weight, adapter, delta, 0, delta.shape[0])
    if len(delta.shape) == 2:
        return _merge_part(weight, adapter, delta, 0)
    part = delta.part
    if part is not None and isinstance(part.index[0], int):
        return _merge_part(weight, adapter, delta, part.index[0])
    _add(weight, _stacked(adapter, delta, 0, delta.experts), adapter, delta, 0, delta.shape[0])


def merge_experts(weight: Any, adapter: Adapter, delta: Delta, begin: int, end: int) -> None:
    """Merge some matrices of a stack in place."""
    weight.add_(_stacked(adapter, delta, begin, end).to(weight.dtype))


def _merge_part(weight: Any, adapter: Adapter, delta: Delta, expert: int) -> None:
    """A stored part of a live tensor: a matrix of a stack, or some of its rows."""
    part = delta.part
    if part and len(delta.shape) == 3:
        change, part = _stacked(adapter, delta, expert, expert + 1)[0], replace(part, index=part.index[1:])
    else:
        a, b = adapter.tensor(delta.a), adapter.tensor(delta.b)
        change = (b.float() @ a.float() * delta.scaling).to(b.dtype)
    weight.add_((part.of(change) if part else change).to(weight.dtype))


def _stacked(adapter: Adapter, delta: Delta, begin: int, end: int) -> Any:
    """B @ A of some experts of a stack."""
    a, b, experts = adapter.tensor(delta.a), adapter.tensor(delta.b), delta.experts
    a = a.reshape(experts, -1, a.shape[-1])[begin:end]  # experts, rank, in
    b = b.reshape(b.shape[0], -1, experts)[..., begin:end]  # out, rank, experts
    return torch.einsum("ore,eri->eoi" if delta.swapped else "ore,eri->eio", b, a) * delta.scaling


def _convolved(adapter: Adapter, delta: Delta) -> Any:
    a, b = adapter.tensor(delta.a), adapter.tensor(delta.b)
    dtype, a, b = b.dtype, a.float(), b.float()
    if delta.shape[2:4] == (1, 1):
        made = (b.squeeze(3).squeeze(2) @ a.squeeze(3).squeeze(2)).unsqueeze(2).unsqueeze(3) * delta.scaling
    else:
        convolve = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[len(delta.shape)]
        made = convolve(a.transpose(0, 1), b).transpose(0, 1) * delta.scaling
    return made.to(dtype)


def _add(weight: Any, change: Any, adapter: Adapter, delta: Delta, begin: int, end: int) -> None:
    """Add a product, and scale by DoRA's magnitude over the norm of the sum."""
    if not delta.magnitude:
        weight.add_(change.to(weight.dtype) if delta.kind in ("embedding", "parameter") else change)
        return
    magnitude = adapter.tensor(delta.magnitude)
    if delta.kind == "conv":
        total = weight + change
        norm = total.norm(p=2, dim=tuple(range(1, total.dim())), keepdim=True).transpose(1, 0)
        factor = (magnitude / norm).view(-1, *(1 for _ in total.shape[1:]))
    else:
        across = delta.kind in ("conv1d", "embedding")
        total = (weight.T if across else weight) + 1 * (change.T if across else change)
        norm = torch.linalg.norm(total, dim=1).to(total.dtype)
        factor = magnitude[begin:end] / norm if not across else magnitude / norm
        factor = factor.view(-1, 1).T if across else factor.view(-1, 1)
    weight.copy_((factor * (weight + change)).to(weight.dtype))
