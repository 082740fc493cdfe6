"""Reads `mappings/dialects/*.toml`: how a target spells the roles, rank by rank; must never look at a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bridge.errors import BridgeError, nearest
from bridge.tables.arch import Roles, load_arch, load_roles
from bridge.tables.files import Place, TableFile, mappings, parse_table, read_table
from bridge.tables.grammar import Call, Expr, parse_row, roles_in
from bridge.tables.slices import LAYOUTS

STAGES = ("first", "layer", "last")
_KEYS = ("cache", "shared_head", "architectures", "joined", *STAGES)
_INDEX = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class DialectRow:
    """A tensor of one rank's file. `stage`: "first", "layer" (of every stage) or "last"."""

    name: str
    expr: Expr
    stage: str
    place: Place

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_in(self.expr)

    @property
    def stacks(self) -> bool:
        """True where the tensor has a leading axis of experts."""
        return isinstance(self.expr, Call) and self.expr.op == "stack"


@dataclass(frozen=True)
class Dialect:
    """One target's spelling of the roles.

    `architectures`: what it has a layout for -> its word for it. `joined`: module -> the module that it may be joined
    with. `cache`: the module of K and V scales. `shared_head`: words of layouts whose tied head is not written.
    """

    file: TableFile
    architectures: Mapping[str, str]
    rows: tuple[DialectRow, ...]
    joined: Mapping[str, str]
    cache: str
    shared_head: tuple[str, ...]

    def rows_of(self, stage: str, held: frozenset[str]) -> Iterator[DialectRow]:
        """Yield the rows of one layer (or of the first or last stage) that holds the roles `held`, in order."""
        for row in self.rows:
            if row.stage == stage and held.issuperset(row.roles):
                yield row


def load_dialect(name: str) -> Dialect:
    """Read `mappings/dialects/<name>.toml`.

    >>> load_dialect("trtllm").architectures["Qwen2ForCausalLM"]
    'qwen'
    """
    return parse_dialect(read_table(mappings() / "dialects" / f"{name}.toml"), load_roles())


def dialect_names() -> list[str]:
    """Names of the dialects that ship, sorted."""
    return sorted(path.stem for path in (mappings() / "dialects").glob("*.toml"))


def parse_dialect(file: TableFile | str, roles: Roles, name: str = "dialect") -> Dialect:
    """Parse one dialect; TableError names file, line and row."""
    file = parse_table(file, name) if isinstance(file, str) else file
    file.known_keys(_KEYS)
    rows: list[DialectRow] = []
    for stage in STAGES:
        for key, value in file.data.get(stage, {}).items():
            if not isinstance(value, dict):
                rows.append(_row(file, stage, stage, key, value, roles))
                continue
            section = f"{stage}.{key}"
            if key not in roles.together:
                raise file.header(section).error(f"`{key}` is no set of roles", hint=nearest(key, roles.together))
            rows += [_row(file, section, stage, inner, text, roles) for inner, text in value.items()]
    modules = {row.name.removesuffix(".weight") for row in rows}
    for pair in file.data.get("joined", {}).items():
        for module in pair:
            if module not in modules:
                raise file.place("joined", pair[0]).error(f"`{module}` has no row", hint=nearest(module, modules))
    words = dict(file.data.get("architectures", {}))
    for word in file.data.get("shared_head", ()):
        if word not in words.values():
            raise file.place("", "shared_head").error(f"`{word}` is no layout", hint=nearest(word, words.values()))
    return Dialect(
        file, words, tuple(rows), dict(file.data.get("joined", {})), str(file.data.get("cache", "")),
        tuple(file.data.get("shared_head", ())),
    )  # fmt: skip


def _row(file: TableFile, section: str, stage: str, key: str, text: object, roles: Roles) -> DialectRow:
    place = file.place(section, key)
    if not isinstance(text, str):
        raise place.error(f"a row's value is a string, not {text!r}", hint='"a.{l}.weight" = "row(attn.o.weight)"')
    expr = parse_row(text, place, dict(roles.roles), roles.dims, LAYOUTS)
    row = DialectRow(key, expr, stage, place)
    _stacked(expr, place, outermost=True)
    named = {*_INDEX.findall(key)}
    if unknown := named - {*roles.index}:
        raise place.error(f"index `{min(unknown)}` is unknown", hint=nearest(min(unknown), roles.index))
    for role in row.roles:
        wants = {*roles.indices(role)} - ({"e"} if row.stacks else set())
        if wants != named or (stage == "layer") != ("l" in named):
            said = " and ".join("{" + index + "}" for index in sorted(wants)) or "no index"
            raise place.error(f"role `{role}` has {said}, the row's name or its section [{stage}] says otherwise")
    return row


def _stacked(expr: Expr, place: Place, outermost: bool) -> None:
    if not isinstance(expr, Call):
        return
    if expr.op == "stack" and not outermost:
        raise place.error("`stack` makes the tensor's first axis, so it stands outermost")
    for arg in expr.args:
        _stacked(arg, place, outermost=False)


def check_dialects() -> list[str]:
    """Return the problems of `mappings/dialects`, empty when rows spell all that architectures hold."""
    problems = []
    for name in dialect_names():
        try:
            dialect = load_dialect(name)
            known = {architecture: load_arch(architecture) for architecture in dialect.architectures}
        except BridgeError as error:
            problems.append(str(error))
            continue
        for architecture, table in known.items():
            if table is None:
                place = dialect.file.place("architectures", architecture)
                problems.append(str(place.error(f"no file of mappings/arch lists `{architecture}`")))
                continue
            spelled = {role for row in dialect.rows for role in row.roles}
            for row in table.rows:
                if row.expr and (not row.only or architecture in row.only):
                    problems += [
                        str(row.place.error(f"{dialect.file.name} has no row for `{role}` of {architecture}"))
                        for role in roles_in(row.expr)
                        if role not in spelled
                    ]
    return problems
