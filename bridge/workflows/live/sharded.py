"""A model whose ranks hold parts of its tensors, as a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.core.arrays import np
from bridge.core.dtypes import DTYPES
from bridge.core.values import TensorSpec
from bridge.sources.memory import MemorySource, bits_of, open_plain
from bridge.sources.memory.unwrapped import cut_tensors, unwrapped
from bridge.sources.source import Source, SourceBase, Wrapped
from bridge.workflows.live.ranks import Ranks

Range = tuple[int, int]


class SharedSource(SourceBase):
    """A model whose ranks hold parts of its tensors. It reads whole ones, which all ranks do in the same order."""

    ranks: Ranks
    specs: Mapping[str, TensorSpec]

    def is_cut(self, name: str) -> bool:
        """Whether reading a tensor of the checkpoint needs other ranks."""
        return True

    def rows(self, name: str) -> list[Range] | None:
        """The rows of a tensor that each rank holds; None if they do not follow each other from rank to rank."""
        return None

    def like_shards(self, name: str) -> bool:
        """Whether ranks hold a tensor as `torch.chunk` would cut it."""
        return False

    def gathered_bytes(self, name: str) -> int:
        """The bytes that must be gathered for a tensor of the checkpoint; 0 if this rank has all of it."""
        return self.specs[name].nbytes

    def forget(self) -> None:
        """Free what was gathered last."""

    def own(self, name: str, begin: int, end: int) -> Any:
        """Rows of a tensor that this rank holds, where they are; `begin` and `end` count in the whole tensor."""
        raise AssertionError(f"{name}: its rows are on several ranks")


class ShardedSource(MemorySource, SharedSource):
    """Also reads the rows that this rank holds."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._last_whole: tuple[str, Any] = "", None

    def renew(self) -> None:
        self.forget()
        super().renew()

    def forget(self) -> None:
        """Free the last tensor that was gathered."""
        self._last_whole = "", None

    @property
    def device(self) -> Any:
        return self._local(next(iter(self._state))).device

    def is_cut(self, name: str) -> bool:
        return any(_is_distributed(self._state[part.live]) for part in self._origins[name].parts)

    def rows(self, name: str) -> list[Range] | None:
        ref = self._origins[name].ref
        if ref is None or not self.specs[name].shape or not self._in_rows(ref.live):
            return None
        if not ref.index:
            return self._chunks(ref.live)
        if ref.order != tuple(range(len(ref.order))):
            return None
        first, count = ref.index[0], self.specs[name].shape[0]
        if isinstance(first, int):
            return [(0, count) if begin <= first < end else (0, 0) for begin, end in self._chunks(ref.live)]
        low, high = first
        shared = [(max(begin, low) - low, min(end, high) - low) for begin, end in self._chunks(ref.live)]
        return [(begin, end) if begin < end else (0, 0) for begin, end in shared]

    def like_shards(self, name: str) -> bool:
        ref = self._origins[name].ref
        return ref is not None and not ref.index

    def own(self, name: str, begin: int, end: int) -> Any:
        ref = self._origins[name].ref
        assert ref is not None
        first, local = self._chunks(ref.live)[self.ranks.rank][0], self._local(ref.live)
        if not ref.index:
            return local[begin - first : end - first]
        if isinstance(at := ref.index[0], int):
            return replace(ref, index=(at - first, *ref.index[1:])).of(local)[begin:end]
        inside = (at[0] + begin - first, at[0] + end - first)
        return replace(ref, index=(inside, *ref.index[1:])).of(local)

    def gathered_bytes(self, name: str) -> int:
        """The bytes that must be gathered for a tensor of the checkpoint; 0 if this rank has all of it."""
        whole = [tensor for part in self._origins[name].parts if _is_distributed(tensor := self._state[part.live])]
        return sum(tensor.numel() * tensor.element_size() for tensor in whole)

    def _whole(self, live: str) -> Any:
        """A tensor of the model, gathered if it is cut; a stack of experts once for all of them.

        Only the caller's thread reads what is cut, so that all ranks meet equally often.
        """
        if not _is_distributed(self._state[live]):
            return self._state[live]
        if self._last_whole[0] != live:
            self._last_whole = live, self._gathered(live)
        return self._last_whole[1]

    def _gathered(self, live: str) -> Any:
        import torch

        tensor = self._state[live]
        if not self._in_rows(live):
            whole = tensor.full_tensor()
            self.ranks.received += whole.nbytes - tensor.to_local().nbytes
            return whole
        local = self._local(live).cpu().contiguous()
        row = local.element_size() * (tensor.numel() // max(tensor.shape[0], 1))
        sizes = [(end - begin) * row for begin, end in self._chunks(live)]
        parts = self.ranks.gather(local.reshape(-1).view(torch.uint8).numpy(), sizes, None, live)
        whole = torch.from_numpy(np.concatenate(parts)).view(tensor.dtype).reshape(tensor.shape)
        return whole.to(self._local(live).device)

    def _local(self, live: str) -> Any:
        tensor = self._state[live]
        return tensor.to_local().detach() if _is_distributed(tensor) else tensor

    def _in_rows(self, live: str) -> bool:
        """Whether all ranks share a tensor along its first axis, as FSDP2 does."""
        from torch.distributed.tensor import Shard

        tensor = self._state[live]
        if not _is_distributed(tensor) or tensor.device_mesh.ndim != 1 or type(tensor.placements[0]) is not Shard:
            return False
        every: bool = tensor.device_mesh.mesh.tolist() == list(range(self.ranks.size))
        return every and tensor.placements[0].dim == 0

    def _chunks(self, live: str) -> list[Range]:
        """The rows of a tensor of the model on each rank, as `torch.chunk` cuts them."""
        rows = self._state[live].shape[0]
        step = -(-rows // self.ranks.size)
        return [(min(rank * step, rows), min((rank + 1) * step, rows)) for rank in range(self.ranks.size)]


class OwnRows(Wrapped):
    """The rows of a sharded source that this rank holds, by their place in the whole tensors; zeros if it has none."""

    def __init__(self, base: Source, own: SharedSource) -> None:
        super().__init__(base)
        self._own = own

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        if not self._has_rows(name):  # what is encoded of them holds for any values
            spec = self.specs[name]
            return np.zeros((end - begin, *spec.shape[1:]), DTYPES[spec.dtype].storage)
        return bits_of(self._own.own(name, begin, end), self.specs[name].dtype)

    def on_device(self, name: str, rows: Range | None = None) -> Any:
        """Return rows of a tensor where they are, not to be changed; None if they are coded on the host."""
        from bridge.quant.codec.on_device import HOST, best_way

        if not self._has_rows(name):
            return None
        own = self._own.own(name, *(rows or (0, self.specs[name].shape[0])))
        return None if best_way(own) == HOST else own

    def _has_rows(self, name: str) -> bool:
        first, stop = (self._own.rows(name) or [(0, 0)] * self._own.ranks.size)[self._own.ranks.rank]
        return first < stop


def is_sharded(model: Any) -> bool:
    """Whether ranks hold parts of a module's tensors."""
    import torch

    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return joined and isinstance(model, torch.nn.Module) and bool(cut_tensors(model))


def open_sharded(model: Any, config: Any, ranks: Ranks) -> ShardedSource:
    """Open a model of which this rank holds a part."""
    source = open_plain(unwrapped(model, parts=True), config, opened=ShardedSource)
    source.ranks = ranks
    return source


def _is_distributed(tensor: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
