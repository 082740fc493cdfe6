"""GPTModels of Megatron-Core that ranks share, as a source."""

from __future__ import annotations

import copy
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.core.arrays import np
from bridge.core.errors import SourceError
from bridge.core.text import listed, named
from bridge.sources.live_models.megatron import open_live
from bridge.sources.memory import bits_of
from bridge.sources.memory.megatron_parts import Part, gpt_models, megatron_parts
from bridge.sources.source import Wrapped
from bridge.workflows.live.ranks import Ranks
from bridge.workflows.live.sharded import SharedSource

KEPT = 1 << 30  # bytes of gathered tensors that stay for the next reads: q, k and v lie in one tensor, gate and up too
SPLIT = (  # fields of the configuration that say how ranks share a model
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "context_parallel_size",
)  # fmt: skip
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor on one rank, from `offsets` on."""

    rank: int
    offsets: Shape
    shape: Shape

    def within(self, index: int | None) -> Box | None:
        """Its part of one matrix of a stack; None if it has none of it."""
        if index is None:
            return self
        first = index - self.offsets[0]
        return Box(self.rank, self.offsets[1:], self.shape[1:]) if 0 <= first < self.shape[0] else None


@dataclass(frozen=True)
class Whole:
    """A tensor of the whole model, by the boxes of all ranks; its values are gathered when they are read."""

    name: str
    dtype: Any
    shape: Shape
    boxes: tuple[Box, ...]
    gathering: Gathering

    def detach(self) -> Whole:
        return self

    def reshape(self, *_: int) -> Whole:
        """The same, as values in a row."""
        return self

    def __getitem__(self, flat: slice) -> Any:
        return self.gathering.values(self, flat.start, flat.stop)


class Gathering:
    """Whole tensors of a model. All ranks read the same ones, in the same order."""

    def __init__(self, ranks: Ranks, parts: Sequence[Part]) -> None:
        self.ranks, self._kept = ranks, OrderedDict[tuple[str, int | None], Any]()
        self.parts = parts

    def forget(self) -> None:
        self._kept.clear()

    def renew(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._kept.clear()

    def values(self, whole: Whole, begin: int, end: int) -> Any:
        """Values `begin` to `end`, in row-major order."""
        import torch

        if len(whole.shape) < 3:
            return self._matrix(whole, None)[begin:end]
        size = math.prod(whole.shape[1:])
        found = []
        for index in range(begin // size, -(-end // size)):
            first = index * size
            found.append(self._matrix(whole, index)[max(begin - first, 0) : end - first])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _matrix(self, whole: Whole, index: int | None) -> Any:
        """A tensor, or one matrix of a stack, as values in a row; kept as long as there is room."""
        key = whole.name, index
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._kept[key] = self._gathered(whole, index)
        while len(self._kept) > 1 and sum(tensor.nbytes for tensor in self._kept.values()) > KEPT:
            self._kept.popitem(last=False)
        return made

    def _gathered(self, whole: Whole, index: int | None) -> Any:
        import torch

        boxes = [box for each in whole.boxes if (box := each.within(index))]
        each = torch.empty((), dtype=whole.dtype).element_size()
        sizes = [
            sum(math.prod(box.shape) for box in boxes if box.rank == rank) * each for rank in range(self.ranks.size)
        ]
        mine, error = np.empty(0, np.uint8), None
        try:
            mine = np.concatenate([mine, *self._own(whole.name, index)])
        except Exception as raised:  # the others learn of it where they wait for these bytes
            error = raised
        arrays = self.ranks.gather(mine, sizes, error, whole.name)
        made = torch.empty(whole.shape if index is None else whole.shape[1:], dtype=whole.dtype)
        at = [0] * self.ranks.size
        for box in boxes:
            nbytes = math.prod(box.shape) * each
            values = torch.from_numpy(arrays[box.rank][at[box.rank] : at[box.rank] + nbytes].copy()).view(whole.dtype)
            at[box.rank] += nbytes
            made[_slices(box)] = values.reshape(box.shape)
        return made.reshape(-1)

    def _own(self, name: str, index: int | None) -> Iterator[np.ndarray]:
        """The bytes of this rank's boxes of a tensor, in their order."""
        for part in self.parts:
            if part.name == name and (index is None or 0 <= index - part.offsets[0] < part.tensor.shape[0]):
                values = part.tensor if index is None else part.tensor[index - part.offsets[0]]
                yield bits_of(values.contiguous(), part.dtype).reshape(-1).view(np.uint8)


class MegatronSource(Wrapped, SharedSource):
    """The whole model in Hugging Face's names, gathered as it is read."""

    def __init__(self, models: Sequence[Any], config: Any, whole: Mapping[str, Whole], gathering: Gathering) -> None:
        super().__init__(open_live(_whole(models[0], whole), config))
        self.root = None  # no directory is read
        self._models, self._gathering, self.ranks = models, gathering, gathering.ranks
        self._boxes = boxes_of(gathering.parts)

    @property
    def device(self) -> Any:
        return next(self._models[0].parameters()).device

    def forget(self) -> None:
        self._gathering.forget()

    def renew(self) -> None:
        """Read the parameters that the model has now; SourceError if they are others than those planned."""
        parts = own_parts(self._models)
        planned, found = {*map(repr, self._boxes)}, {*map(repr, boxes_of(parts))}
        if planned != found:
            changed = {box[0] for box in (*self._boxes, *boxes_of(parts)) if repr(box) in planned ^ found}
            raise SourceError(f"{self.where}: {named(sorted(changed))}: not as it was planned on this rank; plan again")
        self._gathering.renew(parts)


def models_of(model: Any) -> list[Any]:
    """The GPTModels of a model, or of the list of a stage's chunks; [] for others, and without a process group."""
    if "megatron.core" not in sys.modules or not sys.modules["torch"].distributed.is_initialized():
        return []
    return gpt_models([*model] if isinstance(model, list | tuple) else [model])


def own_parts(models: Sequence[Any]) -> list[Part]:
    """This rank's parts that no other rank counts as its own."""
    return [part for part in megatron_parts(models) if not part.is_copy]


def boxes_of(parts: Sequence[Part]) -> list[list[Any]]:
    """What each part is, of a kind that JSON holds: name, dtype, shape of the whole, offsets, shape."""
    return [[part.name, str(part.tensor.dtype), [*part.shape], [*part.offsets], [*part.tensor.shape]] for part in parts]


def open_megatron(
    models: Sequence[Any], config: Any, parts: Sequence[Part], everyone: Sequence[Sequence[Any]], ranks: Ranks
) -> MegatronSource:
    """Open the model of whose tensors this rank has `parts`. `everyone`: `boxes_of` each rank's.

    SourceError if the parts of all ranks are not whole tensors, or no supported architecture has the configuration.
    """
    import torch

    kinds: dict[str, set[tuple[Any, ...]]] = {}
    boxes: dict[str, list[Box]] = {}
    for rank, theirs in enumerate(everyone):
        for name, dtype, shape, offsets, extent in theirs:
            kinds.setdefault(name, set()).add((dtype, tuple(shape)))
            boxes.setdefault(name, []).append(Box(rank, tuple(offsets), tuple(extent)))
    gathering, whole, problems = Gathering(ranks, parts), dict[str, Whole](), []
    for name, found in kinds.items():
        dtype, shape = next(iter(found))
        held = sum(math.prod(box.shape) for box in boxes[name])
        if len(found) > 1:
            problems.append(f"{name}: ranks have it as {' and '.join(sorted(map(str, found)))}")
        elif held != math.prod(shape):
            problems.append(f"{name}: all ranks together hold {held} of its {math.prod(shape)} values")
        kind = getattr(torch, dtype.removeprefix("torch."))
        whole[name] = Whole(name, kind, shape, tuple(boxes[name]), gathering)
    if problems:
        raise listed(f"{type(models[0]).__name__} in memory", problems)
    return MegatronSource(models, config, whole, gathering)


def _whole(model: Any, state: Mapping[str, Whole]) -> Any:
    """A stand-in for the model that is whole on one rank: its configuration, and tensors that are gathered."""
    whole = copy.copy(model)  # another object over the same modules, which are only read
    whole.config = copy.copy(model.config)
    for name in SPLIT:
        setattr(whole.config, name, 1)
    whole.config.sequence_parallel = False
    whole.state_dict = lambda: state
    return whole


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + extent) for at, extent in zip(box.offsets, box.shape, strict=True))
