"""Watches torch run a conversion on weightless tensors and says what part of which tensor each result is.

Never imported before torch is needed anyway. Copies that only make a view contiguous are left out while it watches, so
that a result is still a view, and its offset and strides tell where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.sources.live import LiveRef, Origin
from bridge.values import TensorSpec


class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while the conversion runs; `origin` answers afterwards."""

    def __init__(self, shadows: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive = list(shadows.values())  # an address of a storage means something only as long as it lives
        self._names = {_address(tensor): name for name, tensor in shadows.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in shadows.items()}
        self._joined: dict[int, tuple[list[torch.Tensor], int]] = {}
        self._made_from: dict[int, tuple[str, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return args[0]
        if func is aten.cat.default and len(args[0]) == 1:
            return args[0][0]
        result = func(*args, **(kwargs or {}))
        inputs = list(_tensors(*args))
        known = {_address(t) for t in inputs}
        for tensor in _tensors(result):
            if _address(tensor) not in known:
                self._alive.append(tensor)
                self._made_from[_address(tensor)] = tuple(dict.fromkeys(n for t in inputs for n in self._sources(t)))
                if func is aten.cat.default:
                    self._joined[_address(tensor)] = (list(args[0]), args[1] if len(args) > 1 else 0)
        return result

    def _sources(self, tensor: torch.Tensor) -> tuple[str, ...]:
        name = self._names.get(_address(tensor))
        return (name,) if name is not None else self._made_from.get(_address(tensor), ())

    def origin(self, name: str, result: torch.Tensor) -> Origin:
        """Return where `result`, which the conversion calls `name`, comes from."""
        spec = TensorSpec(name, tuple(result.shape), str(result.dtype).removeprefix("torch."))
        ref = self._ref(result)
        if ref is not None:
            return Origin(spec, (ref,))
        parts, axis = self._joined.get(_address(result), ([], 0))
        refs = [self._ref(part) for part in parts]
        if parts and None not in refs and result.is_contiguous() and result.shape == torch.cat(parts, axis).shape:
            return Origin(spec, tuple(ref for ref in refs if ref is not None), axis % result.ndim)
        return Origin(spec, tuple(LiveRef(source) for source in self._sources(result)), computed=True)

    def _ref(self, view: torch.Tensor) -> LiveRef | None:
        """Express a strided view as an index per axis and an order; None where it is no such view."""
        live = self._names.get(_address(view))
        if live is None:
            return None
        base = torch.empty(self._shapes[live], device="meta")
        if view.shape == base.shape and view.stride() == base.stride():
            return LiveRef(live)
        offset, starts = int(view.storage_offset()), []
        for step in base.stride():
            start, offset = divmod(offset, step) if step else (0, offset)
            starts.append(start)
        axes: list[int] = []
        for extent, step in zip(view.shape, view.stride(), strict=True):
            free = [a for a in range(base.ndim) if a not in axes and starts[a] + extent <= base.shape[a]]
            axis = next((a for a in free if base.stride(a) == step), free[0] if free and extent == 1 else None)
            if axis is None:
                return None
            axes.append(axis)
        ranges = {axis: (starts[axis], starts[axis] + n) for axis, n in zip(axes, view.shape, strict=True)}
        index = tuple(ranges.get(axis, starts[axis]) for axis in range(base.ndim))
        ref = LiveRef(live, index, tuple(sorted(axes).index(axis) for axis in axes))
        back = ref.of(base)
        same = back.shape == view.shape and back.storage_offset() == view.storage_offset()
        steps = zip(back.shape, back.stride(), view.stride(), strict=True)
        return ref if same and all(n == 1 or a == b for n, a, b in steps) else None


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(*value)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
