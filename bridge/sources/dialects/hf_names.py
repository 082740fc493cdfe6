"""Hugging Face directories with another program's tensor names.

A dialect says whether a directory may use its names (`files`); none is loaded if the architecture's own table has the
names. No weight is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bridge.core.formats.weight_file import WeightFile
from bridge.core.mappings import TableFile, read_table, table_files
from bridge.sources.weights.containers import Container, Files
from bridge.sources.weights.shards import Weights
from bridge.tables.architectures.arch import arch_file, row_names
from bridge.tables.architectures.match import architecture_of

if TYPE_CHECKING:
    from bridge.tables.dialects.dialect import Dialect

WRAPPED = ("model.", "module.", "_orig_mod.")  # {"model": state_dict}, FSDP and DDP, torch.compile
_INDEX = re.compile(r"(?<![^.])(?:\d+|\{\w+\})(?![^.])")  # a number in a name, or its placeholder in a row


def dialect_files() -> set[str]:
    """Return the weight files' names that some dialect knows and Hugging Face's programs do not write."""
    return {name for dialect in _dialects() for name in dialect.files or ()}


def respelled(where: str, config: Mapping[str, Any], weights: Weights, parts: Container | None = None) -> Weights:
    """Return the tensors in Hugging Face's names; `weights` itself if it has them or no dialect knows its names.

    parts: the container of the tensors, if it is not their files. One SourceError lists all problems.
    """
    table = arch_file(architecture_of(config))
    kinds = {_INDEX.sub("{}", name): name for name in weights.specs}  # of 40,000 tensors some twenty
    unknown = kinds.keys() - _known(table) if table else set()
    dialect = _dialect(config, kinds.values(), len(kinds) - len(unknown)) if unknown else None
    if dialect is None:
        return weights
    from bridge.sources.dialects.tensors import weights_of
    from bridge.tables.dialects.translate import translate

    files = {s.path: s for s in weights.holder.values() if isinstance(s, WeightFile)}
    container = parts or Files(files.values())
    tensors, translation = translate(dialect, config, _dims(dialect), container.specs.values(), where)
    translated = weights_of(container, translation.native, tensors)
    return dataclasses.replace(translated, ignored=translation.ignored, dialect=dialect.name)


def unwrapped(where: str, config: Mapping[str, Any], container: Container) -> Weights | None:
    """Return the tensors of a state dict without training wrappers; None unless most names are Hugging Face's."""
    from bridge.sources.dialects.tensors import unchanged

    table = arch_file(architecture_of(config))
    prefix = _before(table, container.specs) if table else None
    return None if prefix is None else respelled(where, config, unchanged(container, prefix), container)


def hugging_faces(names: Collection[str]) -> bool:
    """Whether some architecture's table has most of the names."""
    return any(_before(read_table(path), names) is not None for path in table_files("arch"))


def _before(table: TableFile, names: Collection[str]) -> str | None:
    """Return the common prefix before the names of a table's rows, None if most names have no row."""
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
    """Return the names of a table's rows without numbers, with and without the base model's prefix."""
    rows, prefix = [_INDEX.sub("{}", name) for name in row_names(table)], table.data.get("prefix", "")
    return {*rows, *(name.removeprefix(prefix) for name in rows)}


def _dialect(config: Mapping[str, Any], names: Collection[str], least: int) -> Dialect | None:
    """Return the dialect that knows most of the names, if it knows more than `least`."""
    from bridge.tables.dialects.translate import translator

    counted: dict[int, Dialect] = {}
    for dialect in _dialects():
        if architecture_of(config) in dialect.architectures:
            row_of = translator(dialect, config, _dims(dialect)).row_of
            counted.setdefault(sum(row_of(name) is not None for name in names), dialect)
    best = max(counted, default=0)
    return counted[best] if best > least else None


def _dialects() -> Iterator[Dialect]:
    from bridge.tables.dialects.dialect import dialect_names, load_dialect

    return (dialect for dialect in map(load_dialect, dialect_names()) if dialect.files is not None)


def _dims(dialect: Dialect) -> dict[str, int]:
    """The reader takes the checkpoint's own vocabulary, whatever its multiple; config.json has no other dim."""
    return dict.fromkeys(dialect.dims, 1)
