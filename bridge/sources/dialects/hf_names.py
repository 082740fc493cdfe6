"""Hugging Face directories whose tensors bear another program's names: finds the dialect, shows them in Hugging Face's.

Which dialects a directory may be spelled in is theirs to say (`files`); none is loaded where the architecture's own
table has the names. Never reads a weight.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bridge.container import SafetensorsFile
from bridge.sources.shards import Weights
from bridge.sources.torch_zip import TorchFile
from bridge.tables.arch import arch_file, arch_files, row_names
from bridge.tables.files import TableFile, read_table
from bridge.tables.match import architecture_of

if TYPE_CHECKING:
    from bridge.sources.native import Container
    from bridge.tables.dialect import Dialect

WRAPPED = ("model.", "module.", "_orig_mod.")  # {"model": state_dict}, FSDP and DDP, torch.compile
_INDEX = re.compile(r"(?<![^.])(?:\d+|\{\w+\})(?![^.])")  # the number in a name, or what a row has in its place


def dialect_files() -> set[str]:
    """Return the names of weight files that some dialect knows and Hugging Face's programs do not write."""
    return {name for dialect in _dialects() for name in dialect.files or ()}


def respelled(where: str, config: Mapping[str, Any], weights: Weights, parts: Container | None = None) -> Weights:
    """Return the tensors in Hugging Face's names: `weights` themselves where they have them, or nobody knows theirs.

    parts: the container that they are all of, where it is not their files. SourceError tells all that does not fit.
    """
    table = arch_file(architecture_of(config))
    kinds = {_INDEX.sub("{}", name): name for name in weights.specs}  # of 40,000 tensors some twenty
    strange = kinds.keys() - _known(table) if table else set()
    dialect = _dialect(config, kinds.values(), len(kinds) - len(strange)) if strange else None
    if dialect is None:
        return weights
    from bridge.sources.foreign import weights_of
    from bridge.sources.native import Files
    from bridge.tables.spelled import spelled

    files = {s.path: s for s in weights.holder.values() if isinstance(s, SafetensorsFile | TorchFile)}
    container = parts or Files(files.values())
    tensors, made = spelled(dialect, config, _dims(dialect), container.specs.values(), where)
    found = weights_of(container, made.native, tensors)
    return dataclasses.replace(found, ignored=made.ignored, dialect=dialect.name)


def unwrapped(where: str, config: Mapping[str, Any], container: Container) -> Weights | None:
    """Return the tensors of a model's state dict, whatever it was wrapped in for training; None where most of the names
    are not Hugging Face's for the architecture.
    """
    from bridge.sources.foreign import unchanged

    table = arch_file(architecture_of(config))
    prefix = _before(table, container.specs) if table else None
    return None if prefix is None else respelled(where, config, unchanged(container, prefix), container)


def hugging_faces(names: Collection[str]) -> bool:
    """Whether some architecture's table has most of the names."""
    return any(_before(read_table(path), names) is not None for path in arch_files())


def _before(table: TableFile, names: Collection[str]) -> str | None:
    """Return what every name begins with before a table's row, None where most have no row."""
    known, prefix = _known(table), ""
    while True:
        kinds = {_INDEX.sub("{}", name.removeprefix(prefix)) for name in names}
        if 2 * len(kinds & known) > len(kinds):
            return prefix
        word = next((word for word in WRAPPED if all(name.startswith(prefix + word) for name in names)), None)
        if word is None:
            return None
        prefix += word


def _known(table: TableFile) -> set[str]:
    """The names of a table's rows without numbers, with the base model's prefix and without it."""
    rows, prefix = [_INDEX.sub("{}", name) for name in row_names(table)], table.data.get("prefix", "")
    return {*rows, *(name.removeprefix(prefix) for name in rows)}


def _dialect(config: Mapping[str, Any], names: Collection[str], least: int) -> Dialect | None:
    """Return the dialect that knows most of the names, if these are more than `least`."""
    from bridge.tables.spelled import speller

    counted: dict[int, Dialect] = {}
    for dialect in _dialects():
        if architecture_of(config) in dialect.architectures:
            row_of = speller(dialect, config, _dims(dialect)).row_of
            counted.setdefault(sum(row_of(name) is not None for name in names), dialect)
    best = max(counted, default=0)
    return counted[best] if best > least else None


def _dialects() -> Iterator[Dialect]:
    from bridge.tables.dialect import dialect_names, load_dialect

    return (dialect for dialect in map(load_dialect, dialect_names()) if dialect.files is not None)


def _dims(dialect: Dialect) -> dict[str, int]:
    """Of a vocabulary's multiple the reader takes what the checkpoint has; a config.json says no other dim."""
    return dict.fromkeys(dialect.dims, 1)
