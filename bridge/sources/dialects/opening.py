"""Open a checkpoint of another dialect in Hugging Face's names.

The configuration of a `Foreign` checkpoint becomes a config.json, and the dialect's table translates the names. No
weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.files.span import Folder
from bridge.core.text import fold_layers, fold_problems, grouped, named
from bridge.core.values import TensorSpec
from bridge.sources.checkpoint import HfSource
from bridge.sources.configs.derive import Declared, Derived, hf_config
from bridge.sources.configs.facts import Given
from bridge.sources.configs.token_count import token_count
from bridge.sources.configs.tokenizer_files import token_ids
from bridge.sources.dialects.tensors import weights_of
from bridge.sources.quantized.megatron import Statistics, quantizer_state, refuse_changed, unsmoothed
from bridge.sources.side_files import SideFiles
from bridge.sources.weights.containers import Container
from bridge.sources.weights.distributed import json_object
from bridge.sources.weights.ranks import Joined, Rank
from bridge.tables.architectures.match import architecture_of
from bridge.tables.dialects.dialect import Cut, Dialect, DialectRow, load_dialect
from bridge.tables.dialects.translate import row_pattern, translate, translator

STATE = "._extra_state"  # the suffix of a module's state, which Megatron saves with its weights
DIALECTS = ("megatron", "torchtitan", "meta")
_LAYER = re.compile(r"(?!(?:\w+\.)*mtp\.)((?:\w+\.)*layers\.)(\d{1,9})\.")  # those of drafts: in one stage
_NUMBER = re.compile(r"(?<=[.t])\d+(?=\.|$)")

CutOf = Callable[[str], Cut | None]
Join = Callable[[CutOf], Container]  # joins the shares of ranks, which the dialect says how to cut


@dataclass(frozen=True)
class Foreign:
    """A checkpoint in its own names. `join`: its tensors; whole ones ignore how ranks would cut them.

    `given`: the checkpoint's config.json and the caller's `config=`. `side_files`: those to copy, given the container.
    `copies`: heads that the configuration ties to the embedding but that are stored; the conversion compares the two.
    `notes`: other files and directories -> why they are not read. `kind`: the class of its source. `drafts`: tensors of
    draft layers -> the layer's number, after the model's last; a dialect with names of their own for these finds them.
    """

    root: Path
    where: str
    dialect: str
    declared: Declared
    join: Join
    given: Any = None
    side_files: Callable[[Container], SideFiles] = lambda _: SideFiles()
    copies: Collection[str] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    kind: type[HfSource] = HfSource
    drafts: Mapping[str, int] = field(default_factory=dict)


def source_of(checkpoint: Foreign, tokenizer: Any = None) -> HfSource:
    """Open it, or raise one SourceError with all its problems."""
    dialect, where = load_dialect(checkpoint.dialect), checkpoint.where
    # However the architecture cuts its tensors: rows of one name differ only in the blocks.
    any_row = _rows(dialect)
    rough = checkpoint.join(lambda name: Cut(row.cut.axis) if (row := any_row(name)) and row.cut else None)
    state = quantizer_state(rough.specs)
    refuse_changed(where, rough, state)
    named_specs = _without(rough, {*state, *checkpoint.copies, *checkpoint.drafts})
    derived = hf_config(
        where, checkpoint.dialect, checkpoint.declared, named_specs, checkpoint.given,
        lambda: token_count(where, checkpoint.side_files(rough).files, tokenizer),
    )  # fmt: skip
    dims = _dims(dialect, derived)
    drafts = _drafts(dialect, derived, checkpoint)
    layers = {"num_hidden_layers": derived.config["num_hidden_layers"] + drafts} if drafts else {}
    config = derived.config | layers
    cut_of = translator(dialect, config, dims, drafts).cut_of
    container = checkpoint.join(cut_of)
    others = {**_objects(container), **state}
    specs = _without(container, state)
    tensors, translation = translate(dialect, config, dims, specs.values(), where, others, drafts)
    copied = checkpoint.side_files(container)
    main = {name: tensor for name, tensor in tensors.items() if not translation.drafts.has(name)}
    statistics = Statistics(where, translation.architecture, container, translation.native, main)
    reasons = _folded(translation.ignored | statistics.reasons(state))
    dropped = {**copied.dropped, **checkpoint.notes, **training(container), **reasons}
    weights = weights_of(unsmoothed(where, container), translation.native, tensors)
    # null in the derived config, unless the caller gave them
    ids = {name: value for name, value in token_ids(copied.files).items() if derived.config.get(name, 0) is None}
    weights = replace(weights, dialect=checkpoint.dialect)
    side_files = SideFiles(copied.files, dropped)
    source = checkpoint.kind(checkpoint.root, where, derived.config | ids, weights, tokenizer, side_files=side_files)
    source.statistics = statistics if state else None
    return source


def _drafts(dialect: Dialect, derived: Derived, checkpoint: Foreign) -> int:
    """Return how many draft layers come after the model's last layer."""
    if not dialect.draft_layers:
        return len({*checkpoint.drafts.values()})
    return derived.terms["drafts"].value if dialect.draft_rows(architecture_of(derived.config)) else 0


def training(container: Container) -> dict[str, str]:
    """Return the training state among the weights, with its size as the reason to drop it."""
    return {f"{word}.*": f"training state, {nbytes} bytes" for word, nbytes in container.skipped.items()}


def _without(container: Container, names: Collection[str]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in container.specs.items() if name not in names}


def _objects(container: Container) -> dict[str, str]:
    """Return the objects among the tensors -> the module whose state each is, "" for other objects."""
    names = dict.fromkeys(name.partition("/shard_")[0] for name in container.objects)
    return {name: name.removesuffix(STATE) if name.endswith(STATE) else "" for name in names}


def given_config(folder: Folder, config: Any) -> Any:
    """Return the caller's `config=` (a directory stands for its config.json); entries go over the checkpoint's own."""
    if isinstance(config, str | Path) and Path(config).is_dir():
        config = Path(config) / "config.json"
    if not (config is None or isinstance(config, Mapping)):
        return config
    beside = json_object(folder, "config.json")
    given = config or {}
    return config if beside is None else Given({**beside, **given}, beside.keys() - given.keys())


def dialect_of(where: str, specs: Mapping[str, TensorSpec]) -> str:
    """Return the dialect that knows most of the names; SourceError if none knows any."""
    kinds = {_NUMBER.sub("0", name) for name in specs}  # of 20,000 tensors some ten
    known = {name: sum(row is not None for row in map(_rows(load_dialect(name)), kinds)) for name in DIALECTS}
    best = max(known, key=lambda name: known[name])  # some of Meta's names are torchtitan's, which comes first
    if not known[best]:
        raise SourceError(
            f"{where}: its tensors have names of no known dialect ({', '.join(DIALECTS)}): "
            f"{named(specs)}; add a table of their meaning to mappings/dialects"
        )
    return best


def refused(specs: Iterable[str], name: str) -> list[str]:
    """Tensors of a model that no row of a dialect reads, with the reason, before its config is asked for."""
    dialect = load_dialect(name)
    rows = [(row_pattern(key), why) for key, why in dialect.refused.items()]
    return fold_problems((each, why) for each in specs for row, why in rows if row.fullmatch(dialect.bare(each)))


def _rows(dialect: Dialect) -> Callable[[str], DialectRow | None]:
    """Return a function that finds a row for a name, whatever the architecture."""
    patterns = [(row_pattern(row.name), row) for row in dialect.rows]

    def row_of(name: str) -> DialectRow | None:
        bare = dialect.bare(name)
        return next((row for pattern, row in patterns if pattern.fullmatch(bare)), None)

    return row_of


def _folded(reasons: Mapping[str, str]) -> dict[str, str]:
    """Fold the layers of names that share a reason."""
    groups = grouped(reasons, reasons.__getitem__)
    return {name: reasons[group[0]] for group in groups for name in fold_layers(group)}


def _dims(dialect: Dialect, derived: Derived) -> dict[str, int]:
    """Return the dialect's own numbers. The reader takes the checkpoint's vocabulary, whatever its multiple."""
    centered = derived.terms["centered"].value if "centered" in derived.terms else False
    return {name: int(bool(centered)) if name == "centered" else 1 for name in dialect.dims}


def joined(where: str, ranks: Mapping[Rank, Container]) -> Join:
    """Return a function that joins the files of several ranks; every pipeline stage counts its layers from 0."""
    counts: dict[int, int] = {}
    for rank, container in ranks.items():
        numbers = [int(match[2]) + 1 for match in map(_LAYER.match, container.specs) if match]
        counts[rank.pp] = max([counts.get(rank.pp, 0), *numbers])

    def rename(name: str, rank: Rank) -> str:
        before = sum(count for stage, count in counts.items() if stage < rank.pp)
        return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + before}.", name, count=1)

    return lambda cut_of: Joined(where, ranks, cut_of, rename)
