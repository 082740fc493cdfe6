"""Answer questions about data that a graph cannot ask; outputs stay equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.targets.onnx.export.methods.replace import Methods


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


class _Lengths:
    """Of texts with a mask, by which XLM reads no more than that none is longer than the batch."""

    def __init__(self, ids: Any) -> None:
        self.shape, self.device = ids.shape[:1], ids.device

    def size(self, axis: int) -> Any:
        return self.shape[axis]

    def max(self) -> _Lengths:
        return self

    def item(self) -> int:
        return 0


def _xlm(self: Any, input_ids: Any = None, attention_mask: Any = None, **given: Any) -> Any:
    given["lengths"] = _Lengths(input_ids)
    return type(self).forward(self, input_ids, attention_mask=attention_mask, **given)


METHODS: Methods = {"XLMModel": {"forward": _xlm}}
