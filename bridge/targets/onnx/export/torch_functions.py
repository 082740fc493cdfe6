"""Replace complex rotary embeddings and branches on infinite states, which ONNX lacks."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.targets.onnx.export.family import families_of


@contextmanager
def real_rope(model: Any) -> Iterator[None]:
    """Compute the rotary embeddings of `model` in real numbers during the block."""
    heads = {kind: axis for family in families_of(model) for kind, axis in family.heads_axis.items()}
    with ExitStack() as stack:
        for module in model.modules():
            axis = heads.get(type(module).__name__)
            if axis is not None:
                home: Any = sys.modules[type(module).__module__]
                stack.callback(setattr, home, "apply_rotary_emb", home.apply_rotary_emb)
                home.apply_rotary_emb = _rotation(axis, home.apply_rotary_emb)
                module.forward = types.MethodType(_cos_and_sin, module)
        yield


def _cos_and_sin(self: Any, x: Any, position_ids: Any) -> Any:
    """Cosine and sine of each position and frequency, [batch, position, frequency, 2]."""
    angles = position_ids[..., None].float() * self.inv_freq.float()
    return torch.stack((angles.cos(), angles.sin()), -1) * self.attention_scaling


def _rotation(heads: int, original: Any) -> Any:
    """The function that rotates queries and keys; another model of the process still gives it complex numbers."""

    def rotated(x: Any, turn: Any) -> Any:
        cos, sin = turn.unsqueeze(heads).unbind(-1)
        real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)
        return pairs.flatten(-2).type_as(x)

    def rotate(xq: Any, xk: Any, turn: Any) -> Any:
        return original(xq, xk, turn) if turn.is_complex() else (rotated(xq, turn), rotated(xk, turn))

    return rotate


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
