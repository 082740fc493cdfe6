"""Classes with a text model inside: read `mappings/composites/*.toml`.

    [text]      model_type of text_config = the class of mappings/arch whose rows the text model has
    [names]     the beginning of a name in that class's table = its beginning here
    [outer]     entries of the text model that stand beside text_config = their defaults
    [only]      where config.json has an entry = its value: with another one the table says nothing
    [live]      the beginning of a module's name here = its beginning in transformers' model, where that is another
    [dims]      number = where config.json has it, `a.b or a.c` if releases differ; `a.b.0` is the first of a list
    [carried]   tensor = what it is and its shape: linear, convolution, embedding, vector or parameter

Carried tensors belong to towers and projectors. No example of text runs them, so they stay as stored unless a rule of
a recipe names them. An index of their names is a number of [dims], but for the first, whose name has none and tells
whether a checkpoint has the names of the table. They come before the text model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.core.mappings import Place, TableFile, added_files, own_files, read_table, table_text
from bridge.core.parsing.file_cache import cached_by_file
from bridge.core.text import nearest, number
from bridge.tables.architectures.arch import INDEX, ArchTable, Row, load_arch
from bridge.tables.architectures.match import architecture_of
from bridge.tables.expressions.grammar import Formula, parse_shape

_KEYS = ("architectures", "reads", "text", "names", "outer", "only", "live", "dims", "carried")
# what a tensor is -> the layout of its site, "" for none, and how many axes it may have
KINDS = {
    "linear": ("out_in", (2,)), "convolution": ("conv", (3, 4, 5)), "embedding": ("", (2,)), "vector": ("", (1,)),
    "parameter": ("", (1, 2, 3, 4)),
}  # fmt: skip
_ROW = re.compile(r"(\w+)\((.+)\)")
READS = ("images", "sounds")  # what a tower reads: why its matrices stay unquantized
TEXT_CONFIG = "text_config"


@dataclass(frozen=True)
class Carried:
    """A tensor of a tower: its name with named indices, what it is, its shape; `said`: both as the table has them."""

    name: str
    kind: str
    shape: tuple[Formula, ...]
    said: str
    place: Place

    @property
    def index(self) -> tuple[str, ...]:
        return tuple(INDEX.findall(self.name))


@dataclass(frozen=True)
class Composite:
    """One table, see the module's docstring; `text`: model_type of text_config -> class."""

    file: TableFile
    architectures: tuple[str, ...]
    reads: str
    text: Mapping[str, str]
    names: Mapping[str, str]
    outer: Mapping[str, object]
    only: Mapping[str, object]
    live: Mapping[str, str]
    dims: Mapping[str, str]
    carried: tuple[Carried, ...]

    def live_names(self, module: str) -> tuple[str, ...]:
        """The name of a module in transformers' model, () if it is the same."""
        begin = next((begin for begin in self.live if module.startswith(begin)), "")
        return (self.live[begin] + module.removeprefix(begin),) if begin else ()


@dataclass(frozen=True)
class TextModel:
    """The text model of a config: its class, the table of that in names of the composite, and its config alone.

    `aliases`: names of tied tensors here -> those in the model's memory, which plans have where none is stored.
    """

    composite: Composite
    architecture: str
    table: ArchTable
    config: dict[str, Any]
    aliases: Mapping[str, str]


def text_model(config: Mapping[str, Any]) -> TextModel | None:
    """Return the text model inside a class that a composite table lists; None without one.

    None too if text_config is no object or of a model without a table, and for entries that the table does not cover.
    """
    composite, inner = load_composite(architecture_of(config)), config.get(TEXT_CONFIG)
    if composite is None or not isinstance(inner, Mapping):
        return None
    name = composite.text.get(str(inner.get("model_type", next(iter(composite.text)))))
    table = load_arch(name) if name else None
    if name is None or table is None or any(entry(config, at) != value for at, value in composite.only.items()):
        return None
    outer = {field: config.get(field, default) for field, default in composite.outer.items()}
    alone = {**inner, **outer, "architectures": [name]}
    here = _renamed(table, composite.names)
    aliases = {tie.alias: own.alias for tie, own in zip(here.ties, table.ties, strict=True)}
    return TextModel(composite, name, here, alone, aliases)


def entry(config: Mapping[str, Any], paths: str) -> Any:
    """Return the first entry of a config of parts that is there, None without one.

    >>> entry({"vision_config": {"depth": 27, "merge": [2, 3]}}, "vision_config.layers or vision_config.depth")
    27
    """
    for path in paths.split(" or "):
        found: Any = config
        for word in path.split("."):
            if isinstance(found, list) and word.isdecimal():
                found = dict(enumerate(found)).get(int(word))
            else:
                found = found.get(word) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return None


def _renamed(table: ArchTable, names: Mapping[str, str]) -> ArchTable:
    """The table with names that begin as the composite's do."""

    def here(name: str) -> str:
        begin = next((begin for begin in names if name.startswith(begin)), "")
        return names.get(begin, "") + name.removeprefix(begin)

    def rows(known: tuple[Row, ...]) -> tuple[Row, ...]:
        return tuple(replace(row, name=here(row.name)) for row in known)

    ties = tuple(replace(tie, alias=here(tie.alias), stored=here(tie.stored)) for tie in table.ties)
    return replace(
        table, prefix=here(table.prefix), prefixes=(), rows=rows(table.rows), ties=ties, ignored=rows(table.ignored),
        split=rows(table.split), stacked=rows(table.stacked),
    )  # fmt: skip


def load_composite(architecture: str) -> Composite | None:
    """Return the table of a class with a text model inside; None if no table lists it."""
    for path in itertools.chain(own_files("composites"), added_files("composites")):
        # the quoted name first, as for tables of architectures: parsing TOML takes longer
        if f'"{architecture}"' in table_text(path) and architecture in (table := _read(path)).architectures:
            return table
    return None


@cached_by_file
def _read(path: Path) -> Composite:
    return parse_composite(read_table(path))


def parse_composite(file: TableFile) -> Composite:
    """Parse one table; TableError names file, line and row."""
    file.known_keys(_KEYS)
    architectures = file.words("architectures")
    if not architectures:
        raise file.place("", "architectures").error("no `architectures`", hint='architectures = ["..."]')
    if file.data.get("reads") not in READS:
        raise file.place("", "reads").error("`reads` says what the tower reads", hint=f'reads = "{READS[0]}"')
    text = file.texts("text")
    for kind, name in text.items():
        if load_arch(name) is None:
            raise file.place("text", kind).error(f"no file of mappings/arch lists `{name}`")
    for section, hint in (("text", 'llama = "LlamaForCausalLM"'), ("names", '"model." = "language_model.model."')):
        if not file.texts(section):
            raise file.header(section).error(f"[{section}] is empty", hint=hint)
    dims = file.texts("dims")
    carried = tuple(_carried(file, name, row, dims) for name, row in file.texts("carried").items())
    if not carried or carried[0].index:
        raise file.header("carried").error("the first tensor is one of the whole tower, by which its names are known")
    names, outer, only = file.texts("names"), file.section("outer"), file.section("only")
    return Composite(
        file, architectures, file.data["reads"], text, names, outer, only, file.texts("live"), dims, carried
    )


def _carried(file: TableFile, name: str, row: str, dims: Mapping[str, object]) -> Carried:
    place = file.place("carried", name)
    said = _ROW.fullmatch(row)
    if not said or said[1] not in KINDS:
        raise place.error(f"`{row}` is not what a tensor is", hint=f"{', '.join(KINDS)}, each as linear(out, in)")
    shape = parse_shape(said[2], place, dims)
    if len(shape) not in KINDS[said[1]][1]:
        raise place.error(f"a tensor with {number(len(shape), 'axis', 'axes')} is no {said[1]}")
    carried = Carried(name, said[1], shape, row, place)
    for index in carried.index:
        if index not in dims:
            raise place.error(f"index `{index}` is no number of [dims]", hint=nearest(index, dims))
    return carried


def problems_of_composite(composite: Composite) -> Iterator[str]:
    """Yield what is wrong in one table that parsing does not see."""
    file = composite.file
    for name in composite.architectures:
        if load_arch(name) is not None:
            yield str(file.place("", "architectures").error(f"`{name}` is also listed in mappings/arch"))
    used = {name for row in composite.carried for formula in row.shape for name in formula.names}
    used |= {index for row in composite.carried for index in row.index}
    for name in composite.dims.keys() - used:
        yield str(file.place("dims", name).error(f"dim `{name}` is unused: no tensor needs it"))
    tables = [_renamed(table, composite.names) for name in composite.text.values() if (table := load_arch(name))]
    known = {row.name for table in tables for row in (*table.rows, *table.ignored, *table.split, *table.stacked)}
    fields = {name for table in tables for name in (*table.config, *table.computes)}
    for name in composite.outer.keys() - fields:
        yield str(file.place("outer", name).error(f"the text model has no field `{name}`", hint=nearest(name, fields)))
    for begin, here in composite.names.items():
        if not any(row.name.startswith(here) for name in composite.text.values() for row in rows_here(composite, name)):
            yield str(file.place("names", begin).error(f"no row of the text model begins with `{begin}`"))
    for begin in composite.live:
        if not any(name.startswith(begin) for name in (*known, *(row.name for row in composite.carried))):
            yield str(file.place("live", begin).error(f"no row begins with `{begin}`"))
    for row in composite.carried:
        if row.name in known:
            yield str(row.place.error("the text model has a row of this name"))
        if KINDS[row.kind][0] and not row.name.endswith(".weight"):
            yield str(row.place.error(f"the name of a {row.kind} ends with .weight"))


def rows_here(composite: Composite, architecture: str) -> tuple[Row, ...]:
    """The rows of a text model's class, in names of the composite."""
    table = load_arch(architecture)
    rows = _renamed(table, composite.names).rows if table else ()
    return tuple(row for row in rows if not row.only or architecture in row.only)
