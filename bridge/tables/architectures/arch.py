"""Reads `mappings/roles.toml` and `mappings/arch/*.toml` into frozen values; must never look at a checkpoint."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from bridge.errors import PlanError, nearest
from bridge.tables.files import (
    Place,
    TableFile,
    added_files,
    mappings,
    own_files,
    parse_table,
    read_table,
    table_files,
)
from bridge.tables.grammar import Call, Expr, Formula, parse_formula, parse_row, parse_shape, roles_in
from bridge.tables.reads import Reads, merged, parse_reads

KINDS = ("embedding", "norm", "linear", "bias", "router", "head")
_HEAD = [
    "architectures",
    "prefix",
    "bare",
    "order",
    "scaled",
    "config",
    "dims",
    "legacy",
    "inputs",
    "layouts",
    "foreign",
]
_KEYS = [*_HEAD, "rows", "rows_if", "rows_for", "tied_if", "ignore", "ignore_if", "ignore_for"]
Layouts = dict[str, tuple[str, Place]]  # architecture -> the word that a dialect has for its layout, and who says so
_INDEX = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Role:
    name: str
    kind: str
    shape: tuple[Formula, ...]


@dataclass(frozen=True)
class Roles:
    """The vocabulary: roles, the dims their shapes speak of, the named indices, and what stands or falls together.

    `reads`: what matrices of each role read where a table does not say otherwise.
    """

    roles: Mapping[str, Role]
    dims: Mapping[str, str]
    index: Mapping[str, str]
    per: Mapping[str, tuple[str, ...]]
    one_of: Mapping[str, tuple[str, ...]]
    together: Mapping[str, tuple[str, ...]]
    reads: tuple[Reads, ...]
    file: TableFile

    def indices(self, role: str) -> tuple[str, ...]:
        """Return the indices of a role: none, the layer, or layer and expert."""
        stems = [stem for stem in self.per if role.startswith(f"{stem}.")]
        return self.per[max(stems, key=len)] if stems else ()


@dataclass(frozen=True)
class Row:
    """A tensor's name with named indices, and its expression (None: ignored, for `reason`).

    `when` must hold (it may ask for the layer `l`), and the architecture must be one of `only`, where they are given.
    """

    name: str
    expr: Expr | None
    place: Place
    when: Formula | None = None
    only: tuple[str, ...] = ()
    reason: str = ""

    @cached_property
    def index(self) -> tuple[str, ...]:
        """The named indices of the row, in the order of its name."""
        return tuple(_INDEX.findall(self.name))

    @property
    def stacks(self) -> bool:
        """True where the tensor holds all experts."""
        return isinstance(self.expr, Call) and self.expr.op == "stack"


@dataclass(frozen=True)
class Tie:
    alias: str
    stored: str
    when: Formula
    place: Place


@dataclass(frozen=True)
class ArchTable:
    """One architecture family: dims from its config and its Hugging Face spelling of the roles.

    `order`: modules of one parent in the order of the model, where the rows stand in another. `scaled`: embeddings
    whose module does more than look up.
    """

    file: TableFile
    roles: Roles
    architectures: tuple[str, ...]
    prefix: str
    bare: tuple[str, ...]
    config: Mapping[str, object]
    dims: Mapping[str, Formula]
    rows: tuple[Row, ...]
    ties: tuple[Tie, ...]
    ignored: tuple[Row, ...]
    legacy: Mapping[str, str]
    reads: tuple[Reads, ...]
    order: tuple[str, ...]
    scaled: tuple[str, ...]

    def names(self, config: Mapping[str, object]) -> dict[str, object]:
        """Return config fields (with their defaults) and the dims computed from them."""
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
    """Return the table that lists `architecture`, None when nobody wrote one.

    >>> load_arch("LlamaForCausalLM").file.name
    'mappings/arch/llama.toml'
    """
    file = arch_file(architecture)
    return parse_arch(file, load_roles()) if file else None


def arch_file(architecture: str) -> TableFile | None:
    """Return the file that lists `architecture`, its rows not parsed; None when nobody wrote one."""
    for path in itertools.chain(own_files("arch"), added_files("arch")):
        # Parsing TOML costs a good part of a millisecond a file; looking for the quoted name first keeps `plan` quick.
        if f'"{architecture}"' in path.read_text(encoding="utf-8"):
            file = read_table(path)
            if architecture in file.data.get("architectures", ()):
                return file
    return None


def row_names(file: TableFile) -> Iterator[str]:
    """Yield the names of a table's rows, with those of ignored tensors, in a fifth of the time that parsing takes."""
    for kind in ("rows", "ignore"):
        yield from file.data.get(kind, {})
        for groups in (file.data.get(f"{kind}_{when}", {}) for when in ("if", "for")):
            for group in groups.values():
                yield from group


def arch_files() -> list[Path]:
    """Return the files of `mappings/arch` and of third parties, by name."""
    return table_files("arch")


def layouts(dialect: str) -> Layouts:
    """Return the architectures whose own tables say how a dialect lays them out."""
    found: Layouts = {}
    for path in arch_files():
        if "\n[layouts." in path.read_text(encoding="utf-8"):
            found |= layouts_of(read_table(path)).get(dialect, {})
    return found


def layouts_of(file: TableFile) -> dict[str, Layouts]:
    """Return what an architecture's table says of dialects, by their names."""
    found: dict[str, Layouts] = {}
    for architecture in file.section("layouts"):
        section = f"layouts.{architecture}"
        _known(file.header(section), (architecture,), file.words("architectures"))
        for dialect, word in file.texts(section).items():
            found.setdefault(dialect, {})[architecture] = word, file.place(section, dialect)
    return found


@cache
def load_roles() -> Roles:
    """Read `mappings/roles.toml`: once, for it takes more of the time than a table that is written in its words."""
    return parse_roles(read_table(mappings() / "roles.toml"))


def parse_roles(file: TableFile) -> Roles:
    """Parse the vocabulary."""
    file.known_keys([*KINDS, "dims", "index", "per", "one_of", "together", "inputs"])
    dims = file.data["dims"]
    roles: dict[str, Role] = {}
    for kind in KINDS:
        for name, shape in file.data.get(kind, {}).items():
            place = file.place(kind, name)
            if name in roles:
                raise place.error(f"role `{name}` has two kinds: {roles[name].kind}, {kind}")
            roles[name] = Role(name, kind, parse_shape(shape, place, dims))
    for index, dim in file.data["index"].items():
        if dim not in dims:
            raise file.place("index", index).error(f"index `{index}` counts unknown `{dim}`", hint=nearest(dim, dims))
    return Roles(
        roles, dims, file.data["index"], _per(file), _sets(file, "one_of", roles), _sets(file, "together", roles),
        parse_reads(file, roles), file,
    )  # fmt: skip


def _per(file: TableFile) -> dict[str, tuple[str, ...]]:
    per = {stem: tuple(indices) for stem, indices in file.data["per"].items()}
    for stem, indices in per.items():
        for index in indices:
            if index not in file.data["index"]:
                known = nearest(index, file.data["index"])
                raise file.place("per", stem).error(f"index `{index}` is unknown", hint=known)
    return per


def _sets(file: TableFile, section: str, roles: Mapping[str, Role]) -> dict[str, tuple[str, ...]]:
    sets = {name: tuple(members) for name, members in file.data[section].items()}
    for name, members in sets.items():
        for role in members:
            if role not in roles:
                raise file.place(section, name).error(f"role `{role}` is unknown", hint=nearest(role, roles))
    return sets


def parse_arch(file: TableFile | str, roles: Roles, name: str = "table") -> ArchTable:
    """Parse one architecture's table; TableError names file, line and row."""
    file = parse_table(file, name) if isinstance(file, str) else file
    file.known_keys(_KEYS)
    architectures = tuple(file.data.get("architectures", ()))
    if not architectures:
        raise file.place("", "architectures").error("no `architectures`", hint='architectures = ["LlamaForCausalLM"]')
    config = {field: None if value == "none" else value for field, value in file.data.get("config", {}).items()}
    dims = _dims(file, roles, config)
    bare = tuple(file.data.get("bare", ()))
    _known(file.place("", "bare"), bare, architectures)
    rows = _rows(file, roles, [*config, *dims], architectures)
    return ArchTable(
        file, roles, architectures, file.data.get("prefix", ""), bare, config, dims,
        rows, _ties(file, [*config, *dims], {row.name for row in rows}),
        _ignored(file, roles, [*config, *dims], architectures), dict(file.data.get("legacy", {})),
        merged(parse_reads(file, roles.roles), roles.reads), tuple(file.data.get("order", ())), _scaled(file, roles),
    )  # fmt: skip


def _dims(file: TableFile, roles: Roles, config: Mapping[str, object]) -> dict[str, Formula]:
    dims = {}
    for dim, text in file.data.get("dims", {}).items():
        place = file.place("dims", dim)
        if dim not in roles.dims:
            raise place.error(f"dim `{dim}` is unknown", hint=nearest(dim, roles.dims))
        dims[dim] = parse_formula(str(text), place, list(config))
    return dims


def _scaled(file: TableFile, roles: Roles) -> tuple[str, ...]:
    scaled = tuple(file.data.get("scaled", ()))
    known = [role.name for role in roles.roles.values() if role.kind == "embedding"]
    for role in scaled:
        if role not in known:
            raise file.place("", "scaled").error(f"role `{role}` is no embedding", hint=nearest(role, known))
    return scaled


def _rows(file: TableFile, roles: Roles, names: list[str], architectures: tuple[str, ...]) -> tuple[Row, ...]:
    rows = [_row(file, "rows", key, text, roles, names) for key, text in file.data.get("rows", {}).items()]
    for section, when, only, group in _groups(file, "rows", roles, names, architectures):
        rows += [_row(file, section, key, text, roles, names, when, only) for key, text in group.items()]
    return tuple(rows)


def _row(
    file: TableFile, section: str, key: str, text: object, roles: Roles, names: list[str],
    when: Formula | None = None, only: tuple[str, ...] = (),
) -> Row:  # fmt: skip
    place = file.place(section, key)
    _indices(key, roles, place)
    if not isinstance(text, str):
        raise place.error(f"a row's value is a string, not {text!r}", hint='"a.b.{l}.weight" = "attn.q.weight"')
    expr = parse_row(text, place, dict(roles.roles), names)
    row = Row(key, expr, place, when, only)
    for role in roles_in(expr):
        wants = [index for index in roles.indices(role) if index != "e" or not row.stacks]
        if set(wants) != set(row.index):
            want = " and ".join("{" + index + "}" for index in wants) or "no index"
            raise place.error(
                f"role `{role}` has {want}, the row's name has not", hint=f"see [per] of {roles.file.name}"
            )
    return row


def _ignored(file: TableFile, roles: Roles, names: list[str], architectures: tuple[str, ...]) -> tuple[Row, ...]:
    groups: list[tuple[str, Formula | None, tuple[str, ...], dict[str, Any]]]
    groups = [("ignore", None, (), file.data.get("ignore", {}))]
    groups += _groups(file, "ignore", roles, names, architectures)
    rows = []
    for section, when, only, group in groups:
        for key, reason in group.items():
            place = file.place(section, key)
            _indices(key, roles, place)
            if not isinstance(reason, str) or not reason:
                raise place.error("an ignored tensor needs its reason", hint=f'"{key}" = "computed from the config"')
            rows.append(Row(key, None, place, when, only, reason))
    return tuple(rows)


def _groups(
    file: TableFile, kind: str, roles: Roles, names: list[str], architectures: tuple[str, ...]
) -> list[tuple[str, Formula | None, tuple[str, ...], dict[str, Any]]]:
    groups: list[tuple[str, Formula | None, tuple[str, ...], dict[str, Any]]] = []
    for text, group in file.data.get(f"{kind}_if", {}).items():
        section = f'{kind}_if."{text}"'
        when = parse_formula(text, file.header(section), [*names, "l"])
        groups.append((section, when, (), group))
    for text, group in file.data.get(f"{kind}_for", {}).items():
        section = f'{kind}_for."{text}"'
        listed, _, condition = text.partition(" if ")
        only = tuple(part.strip() for part in listed.split(","))
        place = file.header(section)
        _known(place, only, architectures)
        asked = parse_formula(condition, place, [*names, "l"]) if condition else None
        groups.append((section, asked, only, group))
    return groups


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


def _indices(key: str, roles: Roles, place: Place) -> None:
    for part in key.split("."):
        index = _INDEX.search(part)
        if index and index[0] != part:
            raise place.error(f"`{part}`: an index is a whole component of the name", hint=f"`.{index[0]}.`")
        if index and index[1] not in roles.index:
            raise place.error(f"index `{index[0]}` is unknown", hint=nearest(index[1], roles.index))


def _known(place: Place, names: tuple[str, ...], architectures: tuple[str, ...]) -> None:
    for name in names:
        if name not in architectures:
            raise place.error(f"architecture `{name}` is not listed in this file", hint=nearest(name, architectures))
