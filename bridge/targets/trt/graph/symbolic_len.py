"""Let `len(tensor)` stay a dynamic axis while a model is traced.

Python's `len` returns a number, with which torch fixes the axis to the example's extent (RT-DETR's batch).
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def symbolic_len(model: Any) -> Iterator[None]:
    """Replace `len` in the modules of transformers whose code `model` runs; for other callers it is the same."""
    names = {type(module).__module__ for module in model.modules()}
    scopes = [vars(sys.modules[name]) for name in names if name.startswith("transformers.")]
    for scope in scopes:
        scope["len"] = _length
    try:
        yield
    finally:
        for scope in scopes:
            del scope["len"]


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) else builtins.len(value)
