"""A stand-in that shows a module but hides what is in it."""

from __future__ import annotations

from typing import Any

from torch import nn


class _Hidden(nn.Module):
    """Has the attributes of a module, and none of its children, parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["of"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["of"], name)


def hide(module: Any) -> nn.Module:
    """Return a stand-in for a module that a walk over a model shall not meet."""
    return _Hidden(module)
