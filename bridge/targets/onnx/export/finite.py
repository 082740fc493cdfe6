"""Clamp the states of a float16 graph always: it cannot ask whether all are finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def always_clamped(dtype: str) -> Iterator[None]:
    """Answer during the block that not all states are finite, in a graph of float16.

    Layers of BART, Marian, LED and others then clamp their states; transformers does so only if one is infinite. Finite
    ones within 1000 of the largest float16 differ, and no others.
    """
    if dtype != "float16":
        yield
        return
    with _Asked():
        yield


class _Asked(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _NotAll() if func is torch.isfinite else func(*args, **(kwargs or {}))


class _NotAll:
    def all(self) -> bool:
        return False
