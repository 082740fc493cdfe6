"""Keep activations off the device while their forward waits."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from bridge.calibration.walk.budget import STAYS
from bridge.tracker.tensors import tensors_in

HOST = "cpu"
SMALL = STAYS  # positions, masks of short rows


class Offloaded:
    """Keeps the activations of a waiting forward in pinned memory of the host.

    A forward holds its tensors in local variables, too. So a tensor moves by its `data`: whoever holds it sees the
    move. Only one forward at a time has its tensors on the device, and all of them are back there before it goes on.
    `shared`: storages that others use meanwhile; they stay.
    """

    def __init__(self, device: str, shared: Set[int] = frozenset()) -> None:
        self._device, self._shared = torch.device(device), shared
        self._kept: list[_Tensor] = []

    def offload(self, *values: Any) -> None:
        """Move the large tensors that a forward hands out, and those that it handed out before, off the device."""
        if self._device.type == HOST:
            return
        self._kept = [kept for kept in self._kept if kept.tensor() is not None]
        known = {id(kept.tensor()) for kept in self._kept}
        for tensor in tensors_in(values):
            if id(tensor) not in known and tensor.nbytes >= SMALL and self._moves(tensor):
                known.add(id(tensor))
                self._kept.append(_Tensor(weakref.ref(tensor)))
        for kept in self._kept:
            kept.offload()

    def _moves(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has memory of its own; one that is expanded, or a part of another, frees none by moving."""
        storage = tensor.untyped_storage()
        return storage.nbytes() == tensor.nbytes and storage.data_ptr() not in self._shared

    def restore(self) -> None:
        """Put all of them back on the device."""
        for kept in self._kept:
            kept.restore(self._device)


class _Tensor:
    """A tensor and its copy in the host's memory, which is made anew if the tensor was written to."""

    def __init__(self, tensor: weakref.ref[torch.Tensor]) -> None:
        self.tensor = tensor
        self._copy: torch.Tensor | None = None
        self._version = 0
        self._offloaded = False

    def offload(self) -> None:
        tensor = self.tensor()
        if tensor is None or self._offloaded:
            return
        if self._copy is None or tensor._version != self._version:
            self._copy = to_host(tensor)
        tensor.data = self._copy
        self._offloaded = True

    def restore(self, device: torch.device) -> None:
        tensor = self.tensor()
        if tensor is None or not self._offloaded or self._copy is None:
            return
        tensor.data = to_device(self._copy, device)
        self._version, self._offloaded = tensor._version, False


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to pinned memory; blocks, because the journal reads it."""
    return torch.empty_like(tensor, device=HOST, pin_memory=True).copy_(tensor.detach())


def to_device(value: Any, device: torch.device | str) -> Any:
    """Return a value with its tensors on a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def storages(modules: Iterable[tuple[str, Any]], inputs: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the storages of modules and of inputs, which several forwards use."""
    held = [t for _, module in modules for t in (*module._parameters.values(), *module._buffers.values())]
    given = [value for batch in inputs for value in batch.values()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(held, given)}
