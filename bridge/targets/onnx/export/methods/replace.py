"""Give modules other methods for the export."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

Methods = Mapping[str, Mapping[str, Callable[..., Any]]]  # class -> name -> method


def replace_methods(model: Any, methods: Methods) -> None:
    """Give each module of `model` the methods of its class, in place."""
    for module in model.modules():
        for name, method in methods.get(type(module).__name__, {}).items():
            setattr(module, name, types.MethodType(method, module))
