"""Find the block that makes NaN of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch


def why_nan(block: str, modules: Iterable[tuple[str, Any]], more: Iterable[tuple[str, Any]] = ()) -> str:
    """Say which block made a NaN, and which of its tensors has one.

    `modules`: those of the block, by name. `more`: tensors that are read one by one.
    """
    tensors = (
        (f"{name}.{key}", parameter)
        for name, module in modules
        for key, parameter in module._parameters.items()
        if parameter is not None
    )
    broken = next((name for name, parameter in chain(tensors, more) if not bool(parameter.isfinite().all())), "")
    why = f"its {broken} holds NaN or infinity" if broken else "check the data, or calibrate in bfloat16 or float32"
    return f"{block} makes NaN of the calibration data, which hold none before it: {why}"


def has_nan(value: Any) -> bool:
    """Whether a block's output holds NaN."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and bool(value.isnan().any())
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return any(has_nan(item) for item in items)
