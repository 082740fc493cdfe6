"""Opens a checkpoint of another dialect as a source in Hugging Face's names; reads no weight while opening.

What a kind finds (`Foreign`: tensors under their own names, what their configuration says) becomes a config.json, the
dialect's table turns the names, and from there on it is a source like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import SourceError, fold_layers
from bridge.sources.beside import Beside
from bridge.sources.foreign import weights_of
from bridge.sources.foreign_config import Derived, Told, hf_config
from bridge.sources.hf import HfSource, read_json
from bridge.sources.native import Container
from bridge.sources.quantizers import Statistics, quantizer_state, refuse_changed
from bridge.sources.ranks import Cut, Joined, Rank
from bridge.sources.shards import named
from bridge.sources.span import Folder
from bridge.tables.dialect import Dialect, DialectRow, load_dialect
from bridge.tables.spelled import row_pattern, spelled, speller
from bridge.values import TensorSpec

DIALECTS = ("megatron", "torchtitan", "meta")
_LAYER = re.compile(r"((?:\w+\.)*layers\.)(\d+)\.")
_HEAD = re.compile(r"(?:module\.|model\.)*output_layer\.weight")
_NUMBER = re.compile(r"(?<=[.t])\d+(?=\.|$)")

CutOf = Callable[[str], Cut | None]
Join = Callable[[CutOf], Container]  # puts the shares of ranks together, as the dialect says that they are cut


@dataclass(frozen=True)
class Foreign:
    """A checkpoint as a kind found it. `join`: its tensors; whoever has whole ones need not ask how they are cut.

    `given`: a config.json that lies beside, and what the caller gave. `beside`: of the files that hold weights.
    `skipped`: tensors that are none of the model's -> why. `notes`: other files and directories -> why.
    """

    root: Path
    where: str
    dialect: str
    told: Told
    join: Join
    given: Any = None
    beside: Callable[[Container], Beside] = lambda _: Beside()
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def source_of(found: Foreign, tokenizer: Any = None) -> HfSource:
    """Open it, or raise one SourceError with everything that is wrong with it."""
    dialect = load_dialect(found.dialect)
    whole = found.join(rough_cut(dialect))
    state = quantizer_state(whole.specs)
    refuse_changed(found.where, whole, state)
    skipped = {**found.skipped, **state}
    derived = hf_config(found.where, found.dialect, found.told, _without(whole, skipped), found.given)
    dims = _dims(dialect, derived)
    row_of = speller(dialect, derived.config, dims).row_of
    container = found.join(lambda name: _cut(row.cut if (row := row_of(name)) else None))
    tensors, made = spelled(dialect, derived.config, dims, _without(container, skipped).values(), found.where)
    carried = found.beside(container)
    dropped = {**carried.dropped, **found.notes, **skipped, **made.ignored, **unread(container)}
    weights = weights_of(container, made.native, tensors)
    beside = Beside(carried.files, dropped)
    statistics = Statistics(found.where, made.architecture, container, made.native, tensors) if state else None
    return HfSource(
        found.root, found.where, derived.config, weights, tokenizer, beside=beside, statistics=statistics
    )  # fmt: skip


def _without(container: Container, skipped: Mapping[str, str]) -> dict[str, TensorSpec]:
    """The model's own tensors."""
    return {name: spec for name, spec in container.specs.items() if name not in skipped}


def given_config(folder: Folder, config: Any) -> Any:
    """Return the caller's `config=`, over that of a config.json which lies in the checkpoint; a directory has one."""
    if isinstance(config, str | Path) and Path(config).is_dir():
        config = Path(config) / "config.json"
    span = folder.files.get("config.json")
    if span is None or span.offset or not (config is None or isinstance(config, Mapping)):
        return config
    return {**read_json(span.path), **(config or {})}


def dialect_of(where: str, specs: Mapping[str, TensorSpec]) -> str:
    """Return the dialect that knows most of the names; SourceError where none knows any."""
    kinds = {_NUMBER.sub("0", name) for name in specs}  # of 20,000 tensors some ten
    known = {name: sum(row is not None for row in map(_rows(load_dialect(name)), kinds)) for name in DIALECTS}
    best = max(known, key=lambda name: known[name])  # some of Meta's names are torchtitan's, which comes first
    if not known[best]:
        raise SourceError(
            f"{where}: its tensors bear names of no dialect that is known here ({', '.join(DIALECTS)}): "
            f"{named(specs)}; a table in mappings/dialects would say what they mean"
        )
    return best


def rough_cut(dialect: Dialect) -> CutOf:
    """Return how ranks cut a tensor, as far as its shape goes: rows of one name differ at most in the blocks."""
    row_of = _rows(dialect)
    return lambda name: _cut(row.cut if (row := row_of(name)) else None)


def _rows(dialect: Dialect) -> Callable[[str], DialectRow | None]:
    """Return a row of each name that the dialect knows, whatever the architecture."""
    patterns = [(row_pattern(row.name), row) for row in dialect.rows]

    def row_of(name: str) -> DialectRow | None:
        name = next((name.removeprefix(p) for p in dialect.prefixes if name.startswith(p)), name)
        return next((row for pattern, row in patterns if pattern.fullmatch(name)), None)

    return row_of


def unread(container: Container) -> dict[str, str]:
    """Return what a distributed checkpoint holds beside the tensors of the model, and why it is not carried."""
    skipped: Mapping[str, int] = getattr(container, "skipped", {})
    objects: Iterable[str] = getattr(container, "objects", ())
    told = {f"{word}.*": f"training state, {nbytes} bytes" for word, nbytes in skipped.items()}
    states = fold_layers(fold_layers(dict.fromkeys(name.partition("/shard_")[0] for name in objects)))
    return told | {name: "an object of the training program, no tensor" for name in states}


def _dims(dialect: Dialect, derived: Derived) -> dict[str, int]:
    """The dialect's own numbers. Of a vocabulary's multiple its reader takes what the checkpoint has."""
    centered = derived.terms["centered"].value if "centered" in derived.terms else False
    return {name: int(bool(centered)) if name == "centered" else 1 for name in dialect.dims}


def _cut(cut: tuple[int, int] | None) -> Cut | None:
    return Cut(*cut) if cut else None


def stages(names: Mapping[Rank, Iterable[str]], tied: bool) -> Callable[[str, Rank], str | None]:
    """Return how pipeline stages' tensors are called in the whole model: each counts its layers from 0.

    `tied`: the last stage holds a copy of the embedding for the head, which is left out.
    """
    counts: dict[int, int] = {}
    for rank, held in names.items():
        numbers = [int(match[2]) + 1 for match in map(_LAYER.match, held) if match]
        counts[rank.pp] = max([counts.get(rank.pp, 0), *numbers])

    def rename(name: str, rank: Rank) -> str | None:
        if tied and _HEAD.fullmatch(name):
            return None
        before = sum(count for stage, count in counts.items() if stage < rank.pp)
        return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + before}.", name, count=1)

    return rename


def joined(where: str, ranks: Mapping[Rank, Container], tied: bool = False) -> Join:
    """Return how the files of several ranks are put together."""
    rename = stages({rank: container.specs for rank, container in ranks.items()}, tied)
    return lambda cut_of: Joined(where, ranks, cut_of, rename)
