"""Find the tensors in the inputs and outputs of a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """All tensors in values, in order: also inside of tuples, lists, mappings and dataclasses.

    >>> tensors_in((torch.ones(1), {"mask": None, "states": [torch.zeros(2)]}))
    [tensor([1.]), tensor([0., 0.])]
    """
    found: list[torch.Tensor] = []
    waiting, seen = [*reversed(values)], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif (parts := _parts(value)) and id(value) not in seen:
            seen.add(id(value))  # a value that holds itself ends here
            waiting.extend(reversed([*parts]))
    return found


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, Mapping):
        return [*value.values()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()
