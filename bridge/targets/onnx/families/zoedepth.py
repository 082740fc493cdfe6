"""ZoeDepth, which joins the stages of its backbone along the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.targets.onnx.export.family import Family


class _Apart(TorchFunctionMode):
    """Cuts rows into a number of parts, where transformers gives their extent: torch would fix the batch."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.split and kwargs == {"dim": 0}:
            return args[0].unflatten(0, (self.parts, -1)).unbind(0)
        return func(*args, **(kwargs or {}))


def _part(self: Any, stages: Any, *sides: Any) -> Any:
    """Part the stages again by their number."""
    with _Apart(len(stages)):
        return type(self).forward(self, stages, *sides)


FAMILY = Family(methods={"ZoeDepthReassembleStage": {"forward": _part}})
