"""Multiply by matrices that a checkpoint has in one tensor at once.

transformers 5 splits such a tensor when it loads it, as that of queries, keys and values of Nomic's encoders.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk

from bridge.sources.live_models.checkpoint_names import Origin, live_names


def splits(config: Mapping[str, Any]) -> bool:
    """Whether transformers splits a tensor of such a checkpoint when it loads it."""
    kinds = {part.get("model_type") for part in (config, *config.values()) if isinstance(part, Mapping)}
    conversions = [each for kind in kinds if kind for each in get_checkpoint_conversion_mapping(kind) or ()]
    return any(isinstance(step, Chunk) for each in conversions for step in getattr(each, "operations", ()))


def join_linears(model: Any, tensors: Collection[str]) -> None:
    """Give linears of `model` (meta parameters) whose rows are one of `tensors` a single product, in place.

    The first of them holds the whole matrix, so its name is the live name of the tensor; the others have none.
    """
    for name, origin in live_names(model, tensors).items() if tensors else ():
        if name.endswith(".weight") and _is_stack_of_wholes(origin):
            linears = [model.get_submodule(part.live.rpartition(".")[0]) for part in origin.parts]
            if all(type(linear) is nn.Linear for linear in linears):
                _join(linears)


def _is_stack_of_wholes(origin: Origin) -> bool:
    return len(origin.parts) > 1 and not origin.computed and not origin.axis and not any(p.index for p in origin.parts)


def _join(linears: list[Any]) -> None:
    first, product = linears[0], _Product(linears[0])
    ends = torch.tensor([linear.out_features for linear in linears]).cumsum(0).tolist()
    for key in ("weight", "bias"):
        own = [linear._parameters.pop(key) for linear in linears]
        if own[0] is not None:
            first._parameters[key] = nn.Parameter(torch.cat(own), requires_grad=False)
        else:
            first._parameters[key] = None
    for begin, end, linear in zip([0, *ends], ends, linears, strict=False):
        linear.forward = types.MethodType(_rows(product, begin, end), linear)


class _Product:
    """The product of the last input: linears that are joined read the same one."""

    def __init__(self, linear: Any) -> None:
        self.linear = linear
        self.last: tuple[Any, Any] = (None, None)

    def __call__(self, x: Any) -> Any:
        if self.last[0] is not x:
            self.last = (x, functional.linear(x, self.linear.weight, self.linear.bias))
        return self.last[1]


def _rows(product: _Product, begin: int, end: int) -> Any:
    def forward(self: Any, x: Any) -> Any:
        return product(x)[..., begin:end]

    return forward
