"""Opens a checkpoint of another dialect as a source in Hugging Face's names; reads no weight while opening.

What a kind finds (`Foreign`: tensors under their own names, what their configuration says) becomes a config.json, the
dialect's table turns the names, and from there on it is a source like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.errors import SourceError, fold_layers
from bridge.sources.beside import Beside
from bridge.sources.foreign import weights_of
from bridge.sources.foreign_config import Derived, Given, Told, hf_config
from bridge.sources.hf import HfSource
from bridge.sources.native import Container
from bridge.sources.quantizers import Statistics, quantizer_state, refuse_changed, unsmoothed
from bridge.sources.ranks import Cut, Joined, Rank
from bridge.sources.shards import named
from bridge.sources.span import Folder
from bridge.sources.weights_folder import json_object
from bridge.tables.dialect import Dialect, DialectRow, load_dialect
from bridge.tables.spelled import row_pattern, spelled, speller
from bridge.values import TensorSpec

STATE = "._extra_state"  # of a module, what Megatron saves beside its weights
DIALECTS = ("megatron", "torchtitan", "meta")
_LAYER = re.compile(r"((?:\w+\.)*layers\.)(\d{1,9})\.")
_NUMBER = re.compile(r"(?<=[.t])\d+(?=\.|$)")

CutOf = Callable[[str], Cut | None]
Join = Callable[[CutOf], Container]  # puts the shares of ranks together, as the dialect says that they are cut


@dataclass(frozen=True)
class Foreign:
    """A checkpoint as a kind found it. `join`: its tensors; whoever has whole ones need not ask how they are cut.

    `given`: a config.json that lies beside, and what the caller gave. `beside`: of the files that hold weights.
    `copies`: heads that the configuration ties to the embedding and that are stored all the same; whoever converts
    holds the two against each other. `notes`: other files and directories -> why.
    """

    root: Path
    where: str
    dialect: str
    told: Told
    join: Join
    given: Any = None
    beside: Callable[[Container], Beside] = lambda _: Beside()
    copies: Collection[str] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


def source_of(found: Foreign, tokenizer: Any = None) -> HfSource:
    """Open it, or raise one SourceError with everything that is wrong with it."""
    dialect = load_dialect(found.dialect)
    whole = found.join(rough_cut(dialect))
    state = quantizer_state(whole.specs)
    refuse_changed(found.where, whole, state)
    derived = hf_config(found.where, found.dialect, found.told, _without(whole, {*state, *found.copies}), found.given)
    dims = _dims(dialect, derived)
    row_of = speller(dialect, derived.config, dims).row_of
    container = found.join(lambda name: _cut(row.cut if (row := row_of(name)) else None))
    others = {**_objects(container), **state}
    tensors, made = spelled(dialect, derived.config, dims, _without(container, state).values(), found.where, others)
    carried = found.beside(container)
    statistics = Statistics(found.where, made.architecture, container, made.native, tensors)
    reasons = _folded(made.ignored | statistics.reasons(state))
    dropped = {**carried.dropped, **found.notes, **training(container), **reasons}
    weights = replace(weights_of(unsmoothed(found.where, container), made.native, tensors), dialect=found.dialect)
    return HfSource(
        found.root, found.where, derived.config, weights, tokenizer, beside=Beside(carried.files, dropped),
        statistics=statistics if state else None,
    )  # fmt: skip


def training(container: Container) -> dict[str, str]:
    """Return the training state that lies among the weights -> that it is some."""
    return {f"{word}.*": f"training state, {nbytes} bytes" for word, nbytes in container.skipped.items()}


def _without(container: Container, names: Collection[str]) -> dict[str, TensorSpec]:
    """The other tensors."""
    return {name: spec for name, spec in container.specs.items() if name not in names}


def _objects(container: Container) -> dict[str, str]:
    """What lies among the tensors and is none, with the module that it is the state of, "" for that of none."""
    names = dict.fromkeys(name.partition("/shard_")[0] for name in container.objects)
    return {name: name.removesuffix(STATE) if name.endswith(STATE) else "" for name in names}


def given_config(folder: Folder, config: Any) -> Any:
    """Return the caller's `config=`, a directory's config.json or entries over that which lies in the checkpoint."""
    if isinstance(config, str | Path) and Path(config).is_dir():
        config = Path(config) / "config.json"
    if not (config is None or isinstance(config, Mapping)):
        return config
    beside = json_object(folder, "config.json")
    given = config or {}
    return config if beside is None else Given({**beside, **given}, beside.keys() - given.keys())


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
    return lambda name: Cut(row.cut[0]) if (row := row_of(name)) and row.cut else None


def _rows(dialect: Dialect) -> Callable[[str], DialectRow | None]:
    """Return a row of each name that the dialect knows, whatever the architecture."""
    patterns = [(row_pattern(row.name), row) for row in dialect.rows]

    def row_of(name: str) -> DialectRow | None:
        bare = dialect.bare(name)
        return next((row for pattern, row in patterns if pattern.fullmatch(bare)), None)

    return row_of


def _folded(reasons: Mapping[str, str]) -> dict[str, str]:
    """Names that share a reason, layers folded."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return {name: reason for reason, every in names.items() for name in fold_layers(every)}


def _dims(dialect: Dialect, derived: Derived) -> dict[str, int]:
    """The dialect's own numbers. Of a vocabulary's multiple its reader takes what the checkpoint has."""
    centered = derived.terms["centered"].value if "centered" in derived.terms else False
    return {name: int(bool(centered)) if name == "centered" else 1 for name in dialect.dims}


def _cut(cut: tuple[int, int] | None) -> Cut | None:
    return Cut(*cut) if cut else None


def stages(names: Mapping[Rank, Iterable[str]]) -> Callable[[str, Rank], str]:
    """Return how pipeline stages' tensors are called in the whole model: each counts its layers from 0."""
    counts: dict[int, int] = {}
    for rank, held in names.items():
        numbers = [int(match[2]) + 1 for match in map(_LAYER.match, held) if match]
        counts[rank.pp] = max([counts.get(rank.pp, 0), *numbers])

    def rename(name: str, rank: Rank) -> str:
        before = sum(count for stage, count in counts.items() if stage < rank.pp)
        return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + before}.", name, count=1)

    return rename


def joined(where: str, ranks: Mapping[Rank, Container]) -> Join:
    """Return how the files of several ranks are put together."""
    rename = stages({rank: container.specs for rank, container in ranks.items()})
    return lambda cut_of: Joined(where, ranks, cut_of, rename)
