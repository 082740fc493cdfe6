"""Add up what the processes of `torch.distributed` saw of one step.

Each runs the same config on other data. A step in which something is due is one exchange of one vector, with a place
for each tensor of each layer that any process has, so that none waits for a layer that did not run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bridge.core.errors import BridgeError, InspectError
from bridge.quant.codec.arrays import Array
from bridge.workflows.inspect.collect import Sums
from bridge.workflows.inspect.config.layers import Layer
from bridge.workflows.inspect.losses import LossSums
from bridge.workflows.inspect.sums import TensorSums

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Ranks:
    """The processes of a group, more than one. `here`: names of the layers that this one has."""

    def __init__(self, group: Any) -> None:
        from torch import distributed

        self._group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.here: frozenset[str] = frozenset()

    def every_layer(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers of all processes, in the same order for each."""
        self.here = frozenset(layer.name for layer in layers)
        every = {layer.name: layer for part in self.objects(tuple(layers)) for layer in part}
        return tuple(every.values())

    def add_up(self, every: Mapping[Any, Sums]) -> None:
        """Let each tensor's sums be those of all processes; a weight is that of the first that saw it."""
        mine = [_vector(sums) for sums in every.values()]
        ends = np.cumsum([part.size for part in mine])[:-1]
        parts = [np.split(vector, ends) for vector in self._vectors(np.concatenate(mine))]
        for sums, *vectors in zip(every.values(), *parts, strict=True):
            _take(sums, vectors)

    def objects(self, mine: T) -> list[T]:
        """What each process hands in."""
        from torch import distributed

        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, mine, group=self._group)
        return found

    def _vectors(self, mine: Array) -> list[Array]:
        import torch
        from torch import distributed

        on_host = "gloo" in distributed.get_backend(self._group)
        sent = torch.from_numpy(mine).to("cpu" if on_host else torch.accelerator.current_accelerator())
        found = [torch.empty_like(sent) for _ in range(self.size)]
        distributed.all_gather(found, sent, group=self._group)
        return [each.cpu().numpy() for each in found]


def ranks_of(group: Any = None) -> Ranks | None:
    """The processes of `group`, without one those of `torch.distributed`; None for a process alone."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return Ranks(group) if torch.distributed.get_world_size(group) > 1 else None


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """Let an error of one process be one of all; without it, the others would wait."""
    caught: BridgeError | None = None
    try:
        yield
    except BridgeError as error:
        caught = error
    told = ranks.objects(str(caught or "")) if ranks else []
    if caught:
        raise caught
    if problem := next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), ""):
        raise InspectError(problem)


def own_part(name: str, tensor: Tensor) -> Tensor:
    """Of a tensor that is sharded (DTensor): the whole of a weight, else the part of this process."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    found: Tensor = tensor.full_tensor() if name == "weight" else tensor.to_local()  # type: ignore[attr-defined]
    return found


def _vector(sums: Sums) -> Array:
    nothing = np.full(TensorSums([*sums.blocks.values()][:1], magnitudes=False).vector().size, np.nan)
    widest = [sums.widest[stat].vector() if stat in sums.widest else nothing for stat in sums.blocks]
    return np.concatenate([sums.total.vector(), *widest, *(lost.vector() for lost in sums.lost.values())])


def _take(sums: Sums, vectors: Sequence[Array]) -> None:
    """Undo `_vector` for each process, and merge; a block that did not divide in one process has no value."""
    if sums.tensor == "weight":
        vectors = next(([vector] for vector in vectors if _some(sums, vector)), [vectors[0]])
    for number, vector in enumerate(vectors):
        at = sums.total.vector().size
        total = TensorSums.from_vector(vector[:at])
        sums.total = sums.total.merged(total) if number else total
        for stat, blocks in sums.blocks.items():
            size = TensorSums([blocks], magnitudes=False).vector().size
            part, at = vector[at : at + size], at + size
            if np.isnan(part).any():
                sums.widest.pop(stat, None)
            elif stat in sums.widest:
                told = TensorSums.from_vector(part, [blocks])
                sums.widest[stat] = sums.widest[stat].merged(told) if number else told
        for under in sums.lost:
            size = LossSums().vector().size
            lost, at = LossSums.from_vector(vector[at : at + size]), at + size
            sums.lost[under] = sums.lost[under].merged(lost) if number else lost


def _some(sums: Sums, vector: Array) -> bool:
    """Whether a process saw the tensor."""
    at = sums.total.vector().size + sum(TensorSums([b], magnitudes=False).vector().size for b in sums.blocks.values())
    lost = vector[at:].reshape(len(sums.lost), -1) if sums.lost else np.zeros((0, 1))
    return bool(TensorSums.from_vector(vector[: sums.total.vector().size]).numel or lost[:, 0].any())
