"""Read `mappings/arch/*.toml` into frozen values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.core.errors import PlanError
from bridge.core.mappings import Place, TableFile, added_files, own_files, read_table, table_files, table_text
from bridge.core.parsing.file_cache import cached_by_file
from bridge.core.text import nearest
from bridge.tables.architectures.meaning import shared
from bridge.tables.architectures.roles import InputRow, Roles, load_roles, merge_inputs, parse_inputs, sets_of
from bridge.tables.expressions.grammar import Call, Expr, Formula, parse_formula, parse_row, roles_in

_KEYS = [
    "architectures", "prefix", "prefixes", "bare", "order", "scaled", "config", "computes", "reads", "dims",
    "dims_of_layer", "legacy", "live", "inputs", "one_of", "together", "layouts", "foreign", "prune", "let", "rows",
    "rows_if",
    "rows_for", "split", "stacked", "tied_if", "ignore", "ignore_if", "ignore_for",
]  # fmt: skip
Layouts = dict[str, tuple[str, Place]]  # architecture -> the name of its layout in a dialect, and where it is given
INDEX = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Row:
    """A tensor's name with named indices, and its expression (None: ignored, for `reason`).

    `when` is a condition (it may use the layer `l`), `only` lists the row's architectures, () for all.
    """

    name: str
    expr: Expr | None
    place: Place
    when: Formula | None = None
    only: tuple[str, ...] = ()
    reason: str = ""

    @cached_property
    def index(self) -> tuple[str, ...]:
        """The named indices, in the order of the name."""
        return tuple(INDEX.findall(self.name))

    @property
    def stacks(self) -> bool:
        """Whether the tensor has all experts."""
        return isinstance(self.expr, Call) and self.expr.op == "stack"


@dataclass(frozen=True)
class Tie:
    alias: str
    stored: str
    when: Formula
    place: Place


@dataclass(frozen=True)
class ArchTable:
    """One architecture family: dims from its config and its Hugging Face names of the roles.

    `prefixes`: what a checkpoint's names may begin with instead of `prefix`. `order`: modules of one parent in the
    model's order, if the rows have another. `scaled`: embeddings whose module also scales its output. `split`: rows of
    each expert, of checkpoints that have no stacks of them; `stacked`: rows of stacks, of checkpoints that have them
    instead of a tensor of each expert. `computes`: fields of the config that change what the model computes and no
    tensor, with their defaults. `one_of`: sets of roles of which each layer has exactly one, `together`: all or none.
    `dims_of_layer`: dims that layers have of their own. `live`: module of a row -> its name in the model of
    transformers, if it has another there.
    """

    file: TableFile
    roles: Roles
    architectures: tuple[str, ...]
    prefix: str
    prefixes: tuple[str, ...]
    bare: tuple[str, ...]
    config: Mapping[str, object]
    dims: Mapping[str, Formula]
    rows: tuple[Row, ...]
    ties: tuple[Tie, ...]
    ignored: tuple[Row, ...]
    legacy: Mapping[str, str]
    inputs: tuple[InputRow, ...]
    order: tuple[str, ...]
    scaled: tuple[str, ...]
    split: tuple[Row, ...] = ()
    stacked: tuple[Row, ...] = ()
    computes: Mapping[str, object] = field(default_factory=dict)
    one_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    together: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dims_of_layer: Mapping[str, Formula] = field(default_factory=dict)
    live: Mapping[str, str] = field(default_factory=dict)

    def with_other_experts(self) -> ArchTable:
        """Return the table of a checkpoint that has a tensor of each expert instead of stacks, or the reverse."""
        others = (*self.split, *self.stacked)
        roles = {role for row in others if row.expr for role in roles_in(row.expr)}
        left = [at for at, row in enumerate(self.rows) if row.expr and roles.intersection(roles_in(row.expr))]
        kept = tuple(row for at, row in enumerate(self.rows) if at not in left)
        return replace(self, rows=(*kept[: left[0]], *others, *kept[left[0] :]), split=(), stacked=())

    def named(self, name: str, prefix: str) -> str:
        """Return the name of a row in a checkpoint whose names begin with `prefix`, "" if they lack the table's."""
        return prefix + name.removeprefix(self.prefix) if name.startswith(self.prefix) else name

    @property
    def sized(self) -> frozenset[str]:
        """The fields that extents are computed from."""
        formulas = (*self.dims.values(), *self.dims_of_layer.values())
        return frozenset(name for formula in formulas for name in formula.names - {"l"})

    def names_of(self, names: Mapping[str, object], layer: int) -> dict[str, object]:
        """Return fields and dims with those of one layer."""
        here = {**names, "l": layer}
        return {**names, **{dim: formula.count(here) for dim, formula in self.dims_of_layer.items()}}

    def names(self, config: Mapping[str, object]) -> dict[str, object]:
        """Return config fields (with defaults) and the dims computed from them."""
        fields = {field: config.get(field, default) for field, default in self.config.items()}
        dims = {}
        for dim, formula in self.dims.items():
            try:
                dims[dim] = formula.count(fields)
            except PlanError as error:
                place = self.file.place("dims", dim)
                raise PlanError(f"the config does not give `{dim}` ({place.file}:{place.line}): {error}") from error
        return fields | dims


def load_arch(architecture: str) -> ArchTable | None:
    """Return the table that lists `architecture`, None if there is none.

    >>> load_arch("LlamaForCausalLM").file.name
    'mappings/arch/llama.toml'
    """
    path = _find(architecture)
    return _read_arch(path) if path else None


@cached_by_file
def _read_arch(path: Path) -> ArchTable:
    """A conversion asks for its table three times, and parsing the rows takes 25 ms."""
    return parse_arch(read_table(path), load_roles())


def arch_file(architecture: str) -> TableFile | None:
    """Return the file that lists `architecture`, its rows not parsed; None if there is none."""
    path = _find(architecture)
    return read_table(path) if path else None


def _find(architecture: str) -> Path | None:
    """Return the path of the table that lists `architecture`."""
    for path in itertools.chain(own_files("arch"), added_files("arch")):
        # Parsing TOML costs almost a millisecond a file; looking for the quoted name first keeps `plan` fast.
        if f'"{architecture}"' in table_text(path) and architecture in read_table(path).data.get("architectures", ()):
            return path
    return None


def row_names(file: TableFile) -> Iterator[str]:
    """Yield the names of a table's rows and ignored tensors, in a fifth of the time of parsing.

    Not those of [stacked]: in a model's own checkpoint the dialect of names in memory reads them.
    """
    yield from file.data.get("split", {})
    for kind in ("rows", "ignore"):
        yield from file.data.get(kind, {})
        for groups in (file.data.get(f"{kind}_{when}", {}) for when in ("if", "for")):
            for group in groups.values():
                yield from group


def layouts(dialect: str) -> Layouts:
    """Return the architectures whose own tables give their layout in a dialect."""
    merged: Layouts = {}
    for path in table_files("arch"):
        if "\n[layouts." in table_text(path):
            merged |= _read_layouts(path).get(dialect, {})
    return merged


@cached_by_file
def _read_layouts(path: Path) -> dict[str, Layouts]:
    return layouts_of(read_table(path))


def layouts_of(file: TableFile) -> dict[str, Layouts]:
    """Return the layouts that an architecture's table gives, by dialect."""
    by_dialect: dict[str, Layouts] = {}
    for architecture in file.section("layouts"):
        section = f"layouts.{architecture}"
        _known(file.header(section), (architecture,), file.words("architectures"))
        for dialect, word in file.texts(section).items():
            by_dialect.setdefault(dialect, {})[architecture] = word, file.place(section, dialect)
    return by_dialect


def parse_arch(file: TableFile, roles: Roles) -> ArchTable:
    """Parse one architecture's table; TableError names file, line and row."""
    file.known_keys(_KEYS)
    architectures = tuple(file.data.get("architectures", ()))
    if not architectures:
        raise file.place("", "architectures").error("no `architectures`", hint='architectures = ["LlamaForCausalLM"]')
    config = {field: None if value == "none" else value for field, value in file.data.get("config", {}).items()}
    dims = _dims(file, roles, config)
    bare = tuple(file.data.get("bare", ()))
    _known(file.place("", "bare"), bare, architectures)
    rows = _rows(file, roles, [*config, *dims], architectures)
    ties = _ties(file, [*config, *dims], {row.name for row in rows})
    ignored = _ignored(file, roles, [*config, *dims], architectures)
    layer_dims = _dims(file, roles, config, "dims_of_layer")
    formulas = [
        *dims.values(),
        *layer_dims.values(),
        *(row.when for row in (*rows, *ignored)),
        *(tie.when for tie in ties),
    ]
    return ArchTable(
        file, roles, architectures, file.data.get("prefix", ""), file.words("prefixes"), bare, config, dims,
        rows, ties, ignored, dict(file.data.get("legacy", {})),
        merge_inputs(parse_inputs(file, roles.roles), roles.inputs), tuple(file.data.get("order", ())),
        _scaled(file, roles), _split(file, roles, rows),
        _stacked(file, roles, rows, [*config, *dims]), _computes(file, config, formulas),
        _sets(file, "one_of", roles, roles.one_of), _sets(file, "together", roles, roles.together), layer_dims,
        _live(file, rows),
    )  # fmt: skip


def _computes(file: TableFile, config: Mapping[str, object], formulas: Iterable[Formula | None]) -> dict[str, object]:
    """The fields of [computes], and those of [config] that no formula of the rows has."""
    used = frozenset(name for formula in formulas if formula for name in formula.names)
    given = {**shared().section("computes"), **file.section("computes")}
    return {name: value for name, value in config.items() if name not in used} | {
        name: None if value == "none" else value for name, value in given.items()
    }


def _live(file: TableFile, rows: Iterable[Row]) -> dict[str, str]:
    """The names of [live]; each is that of a row's module, or with a dot at its end how some begin."""
    modules, live = {row.name.removesuffix(".weight") for row in rows}, file.texts("live")
    for module in live:
        if module not in modules and not (module.endswith(".") and any(name.startswith(module) for name in modules)):
            hint = nearest(module, modules)
            raise file.place("live", module).error(f"no row has the weight of `{module}`", hint=hint)
    return live


def let_of(file: TableFile) -> dict[str, Formula]:
    """The formulas that others use by their names: [let]."""
    names = [*file.data.get("config", {}), "l"]
    return {name: parse_formula(text, file.place("let", name), names) for name, text in file.texts("let").items()}


def _sets(
    file: TableFile, section: str, roles: Roles, common: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """A table's own sets, and the common ones that share no role with them."""
    own = sets_of(file, section, "role", roles.roles)
    covered = {role for members in own.values() for role in members}
    return own | {name: members for name, members in common.items() if not covered & set(members)}


def _dims(file: TableFile, roles: Roles, config: Mapping[str, object], section: str = "dims") -> dict[str, Formula]:
    dims = {}
    known = [*config, "l"] if section == "dims_of_layer" else list(config)
    for dim, text in file.data.get(section, {}).items():
        place = file.place(section, dim)
        if dim not in roles.dims:
            raise place.error(f"dim `{dim}` is unknown", hint=nearest(dim, roles.dims))
        dims[dim] = parse_formula(str(text), place, known, let_of(file))
    return dims


def _scaled(file: TableFile, roles: Roles) -> tuple[str, ...]:
    scaled = tuple(file.data.get("scaled", ()))
    known = [role.name for role in roles.roles.values() if role.kind == "embedding"]
    for role in scaled:
        if role not in known:
            raise file.place("", "scaled").error(f"role `{role}` is not an embedding", hint=nearest(role, known))
    return scaled


def _rows(file: TableFile, roles: Roles, names: list[str], architectures: tuple[str, ...]) -> tuple[Row, ...]:
    rows = []
    for key, text, place, when, only in _lines(file, "rows", roles, names, architectures):
        if not isinstance(text, str):
            raise place.error(f"a row's value is a string, not {text!r}", hint='"a.b.{l}.weight" = "attn.q.weight"')
        expr = parse_row(text, place, roles.roles, names)
        row = Row(key, expr, place, when, only)
        for role in roles_in(expr):
            indices = [index for index in roles.indices(role) if index != "e" or not row.stacks]
            if set(indices) != set(row.index):
                shown = " and ".join("{" + index + "}" for index in indices) or "no index"
                hint = f"see [per] of {roles.file.name}"
                raise place.error(f"role `{role}` has {shown}, the row's name does not", hint=hint)
        rows.append(row)
    return tuple(rows)


def _split(file: TableFile, roles: Roles, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of [split]; each applies where the stack with its role does."""
    stacks = {role: row for row in rows if row.stacks and row.expr for role in roles_in(row.expr)}
    split = []
    for key, role in file.texts("split").items():
        place = file.place("split", key)
        _check_indices(key, roles, place)
        if role not in stacks:
            raise place.error(f"no stack has the role `{role}`", hint=nearest(role, stacks))
        row = Row(key, parse_row(role, place, roles.roles, ()), place, stacks[role].when, stacks[role].only)
        if {*row.index} != {*roles.indices(role)}:
            raise place.error(f"role `{role}` has {{l}} and {{e}}, the row's name does not")
        split.append(row)
    return tuple(split)


def _stacked(file: TableFile, roles: Roles, rows: tuple[Row, ...], names: list[str]) -> tuple[Row, ...]:
    """The rows of [stacked]; each applies where the tensors of each expert with its roles do."""
    each = {role: row for row in rows if "e" in row.index and row.expr for role in roles_in(row.expr)}
    stacked = []
    for key, text in file.texts("stacked").items():
        place = file.place("stacked", key)
        _check_indices(key, roles, place)
        expr = parse_row(text, place, roles.roles, names)
        own = [each.get(role) for role in roles_in(expr)]
        if own[0] is None or not Row(key, expr, place).stacks or {at and at.when for at in own} != {own[0].when}:
            hint = '"a.{l}.experts" = "stack(moe.up.weight, experts=experts)"'
            raise place.error("a stack of roles of which each expert has a tensor, under one condition", hint=hint)
        stacked.append(Row(key, expr, place, own[0].when, own[0].only))
    return tuple(stacked)


def _ignored(file: TableFile, roles: Roles, names: list[str], architectures: tuple[str, ...]) -> tuple[Row, ...]:
    rows = []
    for key, reason, place, when, only in _lines(file, "ignore", roles, names, architectures):
        if not isinstance(reason, str) or not reason:
            raise place.error("an ignored tensor needs a reason", hint=f'"{key}" = "computed from the config"')
        rows.append(Row(key, None, place, when, only, reason))
    return tuple(rows)


def _lines(
    file: TableFile, kind: str, roles: Roles, names: list[str], architectures: tuple[str, ...]
) -> Iterator[tuple[str, object, Place, Formula | None, tuple[str, ...]]]:
    """Yield the lines of a kind's sections: tensor, value, place, condition, architectures."""
    for section, when, only, group in _groups(file, kind, names, architectures):
        for key, value in group.items():
            place = file.place(section, key)
            _check_indices(key, roles, place)
            yield key, value, place, when, only


def _groups(
    file: TableFile, kind: str, names: list[str], architectures: tuple[str, ...]
) -> Iterator[tuple[str, Formula | None, tuple[str, ...], dict[str, Any]]]:
    """Yield the sections of a kind: name, condition, architectures, content."""
    yield kind, None, (), file.data.get(kind, {})
    for text, group in file.data.get(f"{kind}_if", {}).items():
        section = f'{kind}_if."{text}"'
        yield section, parse_formula(text, file.header(section), [*names, "l"], let_of(file)), (), group
    for text, group in file.data.get(f"{kind}_for", {}).items():
        section = f'{kind}_for."{text}"'
        listed, _, condition = text.partition(" if ")
        only = tuple(part.strip() for part in listed.split(","))
        place = file.header(section)
        _known(place, only, architectures)
        formula = parse_formula(condition, place, [*names, "l"], let_of(file)) if condition else None
        yield section, formula, only, group


def _ties(file: TableFile, names: list[str], rows: set[str]) -> tuple[Tie, ...]:
    ties = []
    for text, group in file.data.get("tied_if", {}).items():
        for alias, stored in group.items():
            place = file.place(f'tied_if."{text}"', alias)
            for name in (alias, stored):
                if name not in rows:
                    raise place.error(f"`{name}` is tied but has no row", hint=nearest(name, rows))
            ties.append(Tie(alias, stored, parse_formula(text, place, names), place))
    return tuple(ties)


def _check_indices(key: str, roles: Roles, place: Place) -> None:
    for part in key.split("."):
        index = INDEX.search(part)
        if index and index[0] != part:
            raise place.error(f"`{part}`: an index is a whole component of the name", hint=f"`.{index[0]}.`")
        if index and index[1] not in roles.index:
            raise place.error(f"index `{index[0]}` is unknown", hint=nearest(index[1], roles.index))


def _known(place: Place, names: tuple[str, ...], architectures: tuple[str, ...]) -> None:
    for name in names:
        if name not in architectures:
            raise place.error(f"architecture `{name}` is not listed in this file", hint=nearest(name, architectures))
