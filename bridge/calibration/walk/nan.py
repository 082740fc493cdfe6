"""Find the block that makes NaN or infinity of the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from bridge.calibration.modelopt import of_modelopt


def broken_tensor(modules: Iterable[tuple[str, Any]], more: Iterable[tuple[str, Any]] = ()) -> str:
    """Return the name of a tensor that holds NaN or infinity, "" if none does.

    `modules`: those of a block, by name. `more`: tensors that are read one by one.
    """
    tensors = (
        (f"{name}.{key}", parameter)
        for name, module in modules
        for key, parameter in module._parameters.items()
        if parameter is not None
    )
    return next((name for name, parameter in chain(tensors, more) if not bool(parameter.isfinite().all())), "")


def why_nan(block: str, broken: str, what: str = "NaN") -> str:
    """Say which block made a NaN, or an infinity, and which of its tensors has one."""
    why = f"its {broken} holds NaN or infinity" if broken else "check the data, or calibrate in bfloat16 or float32"
    return f"{block} makes {what} of the calibration data, which hold none before it: {why}"


@contextmanager
def watched(module: Any) -> Iterator[list[str]]:
    """Yield what shows up among the activations inside a module meanwhile, in its order: "NaN", "infinity"."""
    seen: list[str] = []

    def look(_: Any, given: Any, output: Any) -> None:
        for value in (given, output):
            seen.extend(["NaN"] * has_nan(value) + ["infinity"] * _has_infinity(value))

    # leaves are given activations only: a mask, which attention is given, may hold infinity
    leaves = [child for child in module.modules() if not any(child.children())]
    handles = [leaf.register_forward_hook(look) for leaf in leaves]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def words_of(block: str, error: Exception) -> str:
    """What ModelOpt says of a block in which all is finite; "" for an error of others."""
    if isinstance(cause := error.__cause__, AssertionError):
        words = (str(cause).strip().splitlines() or ["an assertion failed"])[0][:300]
        return (
            f"{block}: ModelOpt refused: {words}; its weights and activations are finite: choose another scheme, or "
            'keep its modules with a recipe (quant = "none")'
        )
    return f"{block}: {error}" if of_modelopt(error) else ""


def has_nan(value: Any) -> bool:
    """Whether a block's output holds NaN."""
    return any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in _tensors(value))


def _has_infinity(value: Any) -> bool:
    return any(tensor.is_floating_point() and bool(tensor.isinf().any()) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ():
        yield from _tensors(item)
