"""Files that each hold one rank's share of a model, joined to whole tensors; never copies a share to do it.

How a tensor was cut and what a rank calls it is the caller's knowledge: the dialect's table says it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bridge.errors import SourceError
from bridge.sources.native import Container, Files, Part, Tiled
from bridge.sources.shards import listed, named, natural
from bridge.sources.span import Folder, Span
from bridge.sources.torch_zip import TorchFile
from bridge.values import TensorSpec

MOST_SHOWN = 4  # missing ranks in a message; a wild number in one file's name would give millions


class Rank(NamedTuple):
    """Which share a file holds: its place in the pipeline and tensor parallel groups."""

    pp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Cut:
    """How tensor parallel ranks divide a tensor: along `axis`, each of its `blocks` equal parts by itself.

    A gated linear_fc1 has two blocks: every rank holds its rows of the gate, then its rows of up.
    """

    axis: int
    blocks: int = 1


_NAMES = (
    re.compile(r"mp_rank_(?P<tp>\d+)/model_weights\.ckpt"),
    re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)/model_weights\.ckpt"),
    re.compile(r"model_weights\.ckpt"),
    re.compile(r"consolidated\.(?P<tp>\d+)\.pth"),
    re.compile(r"mp_rank_(?P<tp>\d+)/model_optim_rng\.pt"),
    re.compile(r"mp_rank_(?P<tp>\d+)_(?P<pp>\d+)/model_optim_rng\.pt"),
)
RUN = "model_optim_rng.pt"  # Megatron-LM's `--ckpt-format torch`: the whole run, of which `model` is the state


def rank_files(folder: Folder) -> dict[Rank, Span]:
    """Return the files of NeMo 1, Meta or Megatron-LM by rank, {} if there are none.

    SourceError where one is missing or unreadable, and where files of two layouts lie there, of which one would count.
    """
    layouts = [found for pattern in _NAMES if (found := _of_layout(folder, pattern))]
    if len(layouts) > 1:
        firsts = ", ".join(min(found.values()) for found in layouts)
        raise SourceError(
            f"{folder.where}: holds files of ranks in {len(layouts)} layouts ({firsts}), so which count is unclear; "
            "move the others away"
        )
    if not layouts:
        return {}
    (found,) = layouts
    problems = [f"{name}: {folder.skipped[name]}" for name in found.values() if name in folder.skipped]
    if problems:
        raise listed(folder.where, problems)
    refuse_absent(folder.where, found, *(1 + max(numbers) for numbers in zip(*found, strict=True)))
    return {rank: folder.files[name] for rank, name in sorted(found.items())}


def refuse_absent(where: str, found: Collection[Rank], stages: int, tensors: int) -> None:
    """SourceError where not every rank of so many pipeline stages and tensor parallel ranks has its file."""
    every = (Rank(pp, tp) for pp in range(stages) for tp in range(tensors))
    absent = [_shown(rank) for rank in itertools.islice((r for r in every if r not in found), MOST_SHOWN)]
    if absent:
        raise SourceError(f"{where}: files of ranks are missing: {', '.join(absent)}; copy them as well")


def _of_layout(folder: Folder, pattern: re.Pattern[str]) -> dict[Rank, str]:
    """The names of one layout by rank, those included that are there and cannot be read."""
    found: dict[Rank, str] = {}
    for name in (*folder.files, *folder.skipped):
        if match := pattern.fullmatch(name):
            rank = Rank(**{axis: int(number) for axis, number in match.groupdict().items()})
            if found.setdefault(rank, name) != name:
                raise SourceError(f"{folder.where}: {name} and {found[rank]} are the same rank")
    return found


def open_ranks(folder: Folder) -> dict[Rank, Container]:
    """Open every rank's file; all that is wrong with any of them is one SourceError."""
    opened: dict[Rank, Container] = {}
    problems: list[str] = []
    for rank, span in rank_files(folder).items():
        try:
            opened[rank] = Files([TorchFile(span, extra=True, within="model" if span.path.name == RUN else "")])
        except SourceError as error:
            problems.append(str(error).removeprefix(folder.where).lstrip("/: "))
    if problems:
        raise listed(folder.where, problems)
    return opened


class Joined:
    """The shares of all ranks as whole tensors.

    `cut_of`: how a tensor (by the name that `rename` gave it) is divided; None where every rank holds all of it:
    reading one holds the copies against each other. `rename`: what a rank's tensor is called in the whole model, for
    pipeline stages count their layers from 0.
    """

    def __init__(
        self,
        where: str,
        ranks: Mapping[Rank, Container],
        cut_of: Callable[[str], Cut | None],
        rename: Callable[[str, Rank], str] = lambda name, rank: name,
    ) -> None:
        shares, problems = _shares(ranks, rename)
        self._tensors: dict[str, Tiled] = {}
        wrong: dict[str, list[str]] = {}
        for name in sorted(shares, key=natural):
            try:
                self._tensors[name] = _join(where, name, shares[name], cut_of(name))
            except SourceError as error:
                wrong.setdefault(str(error), []).append(name)
        problems += [f"{named(names)}: {why}" for why, names in wrong.items()]
        if problems:
            raise listed(where, problems)
        self.specs: Mapping[str, TensorSpec] = {name: tensor.spec for name, tensor in self._tensors.items()}
        self.files = tuple(dict.fromkeys(span for container in ranks.values() for span in container.files))
        held = [(rank, name) for rank, container in ranks.items() for name in container.objects]
        self.objects = tuple(dict.fromkeys(rename(name, rank) for rank, name in held))
        self.skipped: Mapping[str, int] = {}

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with elements `begin` to `end` of the whole tensor."""
        return self._tensors[name].read_flat(begin, end, out)

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        """File and offset of element `begin`."""
        return self._tensors[name].place(begin)


@dataclass(frozen=True)
class _Share:
    """What one rank has of a tensor, and what it calls it."""

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
    """Collect what each tensor is made of, in the order of tensor parallel ranks; all of a stage must have it."""
    held: dict[str, dict[Rank, _Share]] = {}
    for rank in sorted(ranks):
        for own in ranks[rank].specs:
            held.setdefault(rename(own, rank), {})[rank] = _Share(rank, ranks[rank], own)
    wrong: dict[str, list[str]] = {}
    for name, shares in held.items():
        stages = sorted({rank.pp for rank in shares})
        every = {rank for rank in ranks if rank.pp == stages[0]}
        if len(stages) > 1:
            both = ", ".join(_shown(Rank(pp)) for pp in stages[:2])
            wrong.setdefault(f"held by several stages ({both}), so which counts is unclear", []).append(name)
        elif every != shares.keys():
            absent = ", ".join(_shown(rank) for rank in sorted(every - shares.keys()))
            wrong.setdefault(f"not in every rank of its stage: {absent} is without it", []).append(name)
    problems = [f"{named(names)}: {why}" for why, names in wrong.items()]
    return {name: list(shares.values()) for name, shares in held.items()}, problems


def _join(where: str, name: str, shares: list[_Share], cut: Cut | None) -> Tiled:
    specs = [share.spec for share in shares]
    first = specs[0]
    if len({(spec.shape, spec.dtype) for spec in specs}) > 1:
        shown = ", ".join(sorted({f"{spec.dtype} {spec.shape}" for spec in specs}))
        raise SourceError(f"its ranks differ in shape or dtype: {shown}")
    if cut is None or len(shares) == 1:
        whole = functools.partial(_read_alike, where, name, shares), functools.partial(shares[0].place, 0)
        return Tiled(TensorSpec(name, first.shape, first.dtype), [Part((0,) * len(first.shape), first.shape, *whole)])
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
            read, place = functools.partial(share.read, begin), functools.partial(share.place, begin)
            parts.append(Part(offsets, box, read, place))
    return Tiled(TensorSpec(name, shape, first.dtype), parts)


def _read_alike(where: str, name: str, shares: list[_Share], begin: int, end: int, out: np.ndarray) -> np.ndarray:
    """Read what every share is a copy of; SourceError where one is not, for then nobody knows which counts."""
    first, *others = shares
    first.read(0, begin, end, out)
    for share in others:
        copy = share.read(0, begin, end, np.empty_like(out))
        if not np.array_equal(copy.view(np.uint8), out.view(np.uint8)):
            raise SourceError(
                f"{where}: {name}: {_shown(first.rank)} and {_shown(share.rank)} hold copies of it that differ, so "
                "which counts is unclear; take a checkpoint from before they drifted apart, or make the copies equal"
            )
    return out


def _shown(rank: Rank) -> str:
    return f"tp {rank.tp} pp {rank.pp}"
