"""Add up what the processes of `torch.distributed` saw of one step.

Each runs the same config on other data. A step in which something is due is one exchange of one vector, with a place
for each tensor of each layer that any process has, so that none waits for a layer that did not run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bridge.core.errors import InspectError
from bridge.quant.codec.arrays import Array
from bridge.workflows.inspect.collect import Sums
from bridge.workflows.inspect.layers import Layer
from bridge.workflows.inspect.statistics.losses import LossSums
from bridge.workflows.inspect.statistics.sums import TensorSums

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

    def add_up(self, every: Mapping[Any, Sums], shards: bool = False) -> None:
        """Let each tensor's sums be those of all processes; a weight is that of the first that saw it.

        shards: each has a part of a weight, so that it is added up, too.
        """
        mine = [_vector(sums) for sums in every.values()]
        ends = np.cumsum([part.size for part in mine])[:-1]
        parts = [np.split(vector, ends) for vector in self._vectors(np.concatenate(mine))]
        for sums, *vectors in zip(every.values(), *parts, strict=True):
            _take(sums, vectors, first=sums.tensor == "weight" and not shards)

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
    if ranks is None:
        yield
        return
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    told = ranks.objects(f"{type(caught).__name__}: {caught}" if caught else "")
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
    """Everything as float64; blocks that did not divide are NaN."""
    asked = [sums.blocks.get(stat) for stat in sums.asked]
    return np.concatenate([sums.total.vector(asked), *(lost.vector() for lost in sums.lost.values())])


def _take(sums: Sums, vectors: Sequence[Array], first: bool) -> None:
    """Undo `_vector` for each process, and merge; a block that did not divide in one process has no value.

    first: take those of the first process that saw the tensor.
    """
    head, middle = sums.total.totals.size, sums.total.totals.size + len(sums.asked)
    for at, stat in enumerate(sums.asked, head):
        if stat in sums.blocks and any(np.isnan(vector[at]) for vector in vectors):
            sums.leave_out(stat)
    kept = [*range(head), *(head + at for at, stat in enumerate(sums.asked) if stat in sums.blocks)]
    end = middle + sums.total.bins.size
    totals = [TensorSums.from_vector(np.r_[v[kept], v[middle:end]], sums.total.blocks) for v in vectors]
    losses = [
        [LossSums.from_vector(row) for row in v[end:].reshape(len(sums.lost), -1)] if sums.lost else [] for v in vectors
    ]
    if first:
        saw = [
            bool(total.numel or any(each.numel for each in lost)) for total, lost in zip(totals, losses, strict=True)
        ]
        at = saw.index(True) if True in saw else 0
        totals, losses = totals[at : at + 1], losses[at : at + 1]
    sums.total = reduce(TensorSums.merged, totals)
    sums.lost = {under: reduce(LossSums.merged, each) for under, *each in zip(sums.lost, *losses, strict=True)}
