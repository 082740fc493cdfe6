"""Trace a call within the bounds that torch asks for."""

from __future__ import annotations

import builtins
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SUGGESTED = re.compile(r"^\s*(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)", re.MULTILINE)
# torch.export replaces `max`, `min` and `math.pow` in the whole process while it traces; two traces at once put them
# back in the wrong order.
_TRACING = threading.Lock()


def trace(call: Any) -> Any:
    """Trace; if torch suggests tighter bounds for a dynamic axis, use them and try once more.

    Examples are the end of a table of positions, or a layout that differs for an extent of one (`size != 1`), which
    concerns torch's strides and not the graph. An axis that torch would fix to the example's extent is refused.
    """
    import torch
    from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

    try:
        with _TRACING, symbolic_len(call.module):
            return torch.export.export(call.module, call.args, dynamic_shapes=call.dynamic_shapes, strict=False)
    except torch._dynamo.exc.UserError as error:
        try:
            shapes = refine_dynamic_shapes_from_suggested_fixes(error.msg, call.dynamic_shapes)
        except Exception:
            shapes = _bounded(call.dynamic_shapes, error.msg)
        if shapes is None or _fixed(shapes) != _fixed(call.dynamic_shapes):
            raise error from None
        with _TRACING, symbolic_len(call.module):
            return torch.export.export(call.module, call.args, dynamic_shapes=shapes, strict=False)


@contextmanager
def symbolic_len(model: Any) -> Iterator[None]:
    """Replace `len` in the modules of transformers whose code `model` runs; for other callers it is the same.

    Python's `len` of a tensor is a number, with which torch fixes the axis to the example's extent (RT-DETR's batch).
    """
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
    import torch

    return value.shape[0] if isinstance(value, torch.Tensor) else builtins.len(value)


def _fixed(shapes: Any) -> int:
    """How many axes have a number."""
    from torch.utils import _pytree

    return sum(isinstance(dim, int) for dim in _pytree.tree_leaves(shapes))


def free(program: Any) -> None:
    """Break the cycles that keep a traced program alive forever, 7 MB each time.

    The cache of torch's symbols holds fake tensors, whose sizes hold the symbols in C++, where gc does not see them.
    """
    modes: set[Any] = {getattr(node.meta.get("val"), "fake_mode", None) for node in program.graph.nodes}
    for mode in modes - {None}:
        mode.shape_env.fake_tensor_cache.clear()


def _bounded(shapes: Any, message: str) -> Any:
    """Bound the axes that torch's message names, also beside a `DimHint`; None if it names no bound."""
    from torch.export import Dim
    from torch.utils import _pytree

    limits = {name: (int(low or 0), int(high or 0)) for name, low, high in _SUGGESTED.findall(message)}
    if " != 1" in message or "guard 1 != " in message:
        named = set(re.findall(r"Not all values of (\w+)", message)) or {"sequence"}
        limits |= {name: (2, limits.get(name, (0, 0))[1]) for name in named}
    bounds: dict[str, Any] = {}

    def bounded(dim: Any) -> Any:
        name = getattr(dim, "__name__", "")
        if name not in limits:
            return dim
        low, high = limits[name]
        return bounds.setdefault(name, Dim(name, min=max(low, dim.min), max=min(high or dim.max, dim.max)))

    return _pytree.tree_map(bounded, shapes) if limits else None
