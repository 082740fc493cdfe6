"""Join files that each hold one rank's share of a model.

The caller says how a tensor was cut and what a rank calls it: the dialect's table knows. No share is copied to join it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bridge.core.arrays import np
from bridge.core.errors import SourceError, collected
from bridge.core.files.span import Folder, Span
from bridge.core.text import listed, named
from bridge.core.values import TensorSpec
from bridge.sources.weights.containers import Container, Files, Tile, TiledTensor, TiledTensors

if TYPE_CHECKING:
    from bridge.tables.dialects.dialect import Cut

MAX_SHOWN = 4  # missing ranks in a message; a wild number in one file's name would give millions


class Rank(NamedTuple):
    """The place of a file's share in the pipeline and tensor parallel groups."""

    pp: int = 0
    tp: int = 0


_NAMES = (
    re.compile(r"mp_rank_(?P<tp>\d+)/model_weights\.ckpt"),
    re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)/model_weights\.ckpt"),
    re.compile(r"model_weights\.ckpt"),
    re.compile(r"consolidated\.(?P<tp>\d+)\.pth"),
    re.compile(r"mp_rank_(?P<tp>\d+)/model_optim_rng\.pt"),
    re.compile(r"mp_rank_(?P<tp>\d+)_(?P<pp>\d+)/model_optim_rng\.pt"),
)
RUN = "model_optim_rng.pt"  # Megatron-LM's `--ckpt-format torch`: the whole run; the weights are under `model`


def rank_files(folder: Folder) -> dict[Rank, Span]:
    """Return the files of NeMo 1, Meta or Megatron-LM by rank, {} if there are none.

    SourceError if one is missing or unreadable, or if the folder has files of two layouts.
    """
    layouts = [names for pattern in _NAMES if (names := _of_layout(folder, pattern))]
    if len(layouts) > 1:
        firsts = ", ".join(min(names.values()) for names in layouts)
        raise SourceError(
            f"{folder.where}: files of ranks in {len(layouts)} layouts ({firsts}); which to read is unclear; move the "
            "others away"
        )
    if not layouts:
        return {}
    (names,) = layouts
    if problems := [f"{name}: {folder.skipped[name]}" for name in names.values() if name in folder.skipped]:
        raise listed(folder.where, problems)
    refuse_absent(folder.where, names, *(1 + max(numbers) for numbers in zip(*names, strict=True)))
    return {rank: folder.files[name] for rank, name in sorted(names.items())}


def refuse_absent(where: str, present: Collection[Rank], stages: int, tensors: int) -> None:
    """SourceError unless every rank of so many pipeline stages and tensor parallel ranks has its file."""
    every = (Rank(pp, tp) for pp in range(stages) for tp in range(tensors))
    absent = [_shown(rank) for rank in itertools.islice((r for r in every if r not in present), MAX_SHOWN)]
    if absent:
        raise SourceError(f"{where}: files of ranks are missing: {', '.join(absent)}; copy them as well")


def _of_layout(folder: Folder, pattern: re.Pattern[str]) -> dict[Rank, str]:
    """Return the file names of one layout by rank, unreadable files included."""
    names: dict[Rank, str] = {}
    for name in (*folder.files, *folder.skipped):
        if match := pattern.fullmatch(name):
            rank = Rank(**{axis: int(number) for axis, number in match.groupdict().items()})
            if names.setdefault(rank, name) != name:
                raise SourceError(f"{folder.where}: {name} and {names[rank]} are the same rank")
    return names


def open_ranks(folder: Folder) -> dict[Rank, Container]:
    """Open every rank's file; one SourceError lists the problems of all."""
    from bridge.core.formats.torch_file import TorchFile

    opened: dict[Rank, Container] = {}
    problems: list[str] = []
    for rank, span in rank_files(folder).items():
        with collected(problems, folder.where):
            opened[rank] = Files([TorchFile(span, extra=True, within="model" if span.path.name == RUN else "")])
    if problems:
        raise listed(folder.where, problems)
    return opened


class Joined(TiledTensors):
    """The shares of all ranks as whole tensors.

    `cut_of`: how a tensor, by its name in the whole model, is divided; None if every rank has all of it: reading it
    compares the copies. `rename`: a rank's name of a tensor -> its name in the whole model, because pipeline stages
    count their layers from 0.
    """

    def __init__(
        self,
        where: str,
        ranks: Mapping[Rank, Container],
        cut_of: Callable[[str], Cut | None],
        rename: Callable[[str, Rank], str] = lambda name, rank: name,
    ) -> None:
        shares, problems = _shares(ranks, rename)
        super().__init__(where, shares, lambda name: _join(where, name, shares[name], cut_of(name)), problems)
        self.files = tuple(dict.fromkeys(span for container in ranks.values() for span in container.files))
        held = [(rank, name) for rank, container in ranks.items() for name in container.objects]
        self.objects = tuple(dict.fromkeys(rename(name, rank) for rank, name in held))


@dataclass(frozen=True)
class _Share:
    """One rank's share of a tensor, and its name there."""

    rank: Rank
    container: Container
    name: str

    @property
    def spec(self) -> TensorSpec:
        return self.container.specs[self.name]

    def read(self, first: int, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        return self.container.read_flat(self.name, first + begin, first + end, out)

    def place(self, first: int, begin: int) -> tuple[str, int]:
        return self.container.place(self.name, first + begin)


def _shares(
    ranks: Mapping[Rank, Container], rename: Callable[[str, Rank], str]
) -> tuple[dict[str, list[_Share]], list[str]]:
    """Collect the shares of each tensor by tensor parallel rank; every rank of a stage must have one."""
    by_name: dict[str, dict[Rank, _Share]] = {}
    for rank in sorted(ranks):
        for own in ranks[rank].specs:
            by_name.setdefault(rename(own, rank), {})[rank] = _Share(rank, ranks[rank], own)
    wrong: dict[str, list[str]] = {}
    for name, shares in by_name.items():
        stages = sorted({rank.pp for rank in shares})
        every = {rank for rank in ranks if rank.pp == stages[0]}
        if len(stages) > 1:
            both = ", ".join(_shown(Rank(pp)) for pp in stages[:2])
            wrong.setdefault(f"in several stages ({both}); which one to read is unclear", []).append(name)
        elif every != shares.keys():
            absent = ", ".join(_shown(rank) for rank in sorted(every - shares.keys()))
            wrong.setdefault(f"not in every rank of its stage: {absent} does not have it", []).append(name)
    problems = [f"{named(names)}: {why}" for why, names in wrong.items()]
    return {name: list(shares.values()) for name, shares in by_name.items()}, problems


def _join(where: str, name: str, shares: list[_Share], cut: Cut | None) -> TiledTensor:
    specs = [share.spec for share in shares]
    first = specs[0]
    if len({(spec.shape, spec.dtype) for spec in specs}) > 1:
        shown = ", ".join(sorted({f"{spec.dtype} {spec.shape}" for spec in specs}))
        raise SourceError(f"its ranks differ in shape or dtype: {shown}")
    if cut is None or len(shares) == 1:
        read = partial(_read_identical, where, name, shares)
        tile = Tile((0,) * len(first.shape), first.shape, read, partial(shares[0].place, 0))
        return TiledTensor(TensorSpec(name, first.shape, first.dtype), [tile])
    axis, blocks = cut.axis, cut.blocks
    if axis >= len(first.shape) or first.shape[axis] % blocks or (axis and blocks > 1):
        raise SourceError(f"a share of shape {first.shape} cannot be {blocks} blocks along axis {axis}")
    step = first.shape[axis] // blocks
    shape = tuple(n * len(shares) if at == axis else n for at, n in enumerate(first.shape))
    box = tuple(step if at == axis else n for at, n in enumerate(first.shape))
    parts = []
    for block in range(blocks):
        for number, share in enumerate(shares):
            offset = (block * len(shares) + number) * step
            offsets = tuple(offset if at == axis else 0 for at in range(len(shape)))
            begin = block * (first.size // blocks)
            parts.append(Tile(offsets, box, partial(share.read, begin), partial(share.place, begin)))
    return TiledTensor(TensorSpec(name, shape, first.dtype), parts)


def _read_identical(where: str, name: str, shares: list[_Share], begin: int, end: int, out: np.ndarray) -> np.ndarray:
    """Read a tensor that every rank has a copy of; SourceError if the copies differ."""
    first, *others = shares
    first.read(0, begin, end, out)
    for share in others:
        copy = share.read(0, begin, end, np.empty_like(out))
        if not np.array_equal(copy.view(np.uint8), out.view(np.uint8)):
            raise SourceError(
                f"{where}: {name}: the copies of {_shown(first.rank)} and {_shown(share.rank)} differ; which one to "
                "read is unclear; take a checkpoint from before they drifted apart, or make the copies equal"
            )
    return out


def _shown(rank: Rank) -> str:
    return f"tp {rank.tp} pp {rank.pp}"
