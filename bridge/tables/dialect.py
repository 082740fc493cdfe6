"""Reads `mappings/dialects/*.toml`: how others than Hugging Face spell the roles; must never look at a checkpoint.

[first] [layer] [last]         rows, written where a layer (or the model) holds all their roles
[layer.gated]                  and all of that set of roles.toml
[for.qwen3]                    rows of one layout, as [architectures] calls it
[also] [for.qwen3.also]        other spellings: read, not written
[absent]                       roles that it cannot say -> why
[ignore] [for.qwen3.ignore]    tensors that are none of the model's weights -> why
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from bridge.errors import nearest
from bridge.tables.arch import Roles, load_roles
from bridge.tables.files import Place, TableFile, mappings, parse_table, read_table
from bridge.tables.grammar import Call, Expr, Ref, parse_row, roles_in
from bridge.tables.layouts import LAYOUTS

STAGES = ("first", "layer", "last")
_HEAD = ("cache", "shared_head", "prefixes", "architectures", "joined", "dims")
_INNER = ("also", "ignore")  # what a layout's own section may hold besides rows
_KEYS = (*_HEAD, *STAGES, "for", "also", "absent", "ignore")
_INDEX = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class DialectRow:
    """A tensor of one rank's file. `stage`: "first", "layer" (of every stage) or "last".

    `only`: the layout's word that has it, "" for all. `written`: False for another spelling, which is only read.
    `needs`: roles that a layer must hold besides to have it written, those of its section.
    """

    name: str
    expr: Expr
    stage: str
    place: Place
    only: str = ""
    written: bool = True
    needs: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_in(self.expr)

    @property
    def stacks(self) -> bool:
        """True where the tensor has a leading axis of experts."""
        return isinstance(self.expr, Call) and self.expr.op == "stack"

    @property
    def cut(self) -> tuple[int, int] | None:
        """How tensor-parallel ranks share it: the axis, and how many blocks are cut along it, each by itself.

        None where every rank holds all of it.
        """
        return cut_of(self.expr)


@dataclass(frozen=True)
class Dialect:
    """One spelling of the roles.

    `architectures`: what it has a layout for -> its word for it. `joined`: module -> the module that it may be joined
    with. `cache`: the module of K and V scales. `shared_head`: words of layouts whose tied head is not written.
    `prefixes`: what names may begin with besides. `dims`: numbers that a checkpoint's own config decides -> their
    meaning. `absent`: roles of its architectures that it cannot say -> why. `ignored`: tensors that are no weights ->
    why, "" or a layout's word -> name -> reason.
    """

    file: TableFile
    architectures: Mapping[str, str]
    rows: tuple[DialectRow, ...]
    joined: Mapping[str, str]
    cache: str
    shared_head: tuple[str, ...]
    prefixes: tuple[str, ...] = ()
    dims: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def rows_of(self, stage: str, held: frozenset[str], word: str = "") -> Iterator[DialectRow]:
        """Yield the rows of one layer (or of the first or last stage) that holds the roles `held`, in order.

        word: the layout's; rows of other layouts are left out.
        """
        for row in self.rows:
            if (
                row.written
                and row.stage == stage
                and row.only in ("", word)
                and held.issuperset((*row.roles, *row.needs))
            ):
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
    dims = dict(file.data.get("dims", {}))
    roles = replace(roles, dims={**roles.dims, **dims})
    rows: list[DialectRow] = []
    for stage in STAGES:
        for key, value in file.data.get(stage, {}).items():
            if not isinstance(value, dict):
                rows.append(_row(file, stage, stage, key, value, roles))
                continue
            section = f"{stage}.{key}"
            if key not in roles.together:
                raise file.header(section).error(f"`{key}` is no set of roles", hint=nearest(key, roles.together))
            found = [_row(file, section, stage, inner, text, roles) for inner, text in value.items()]
            rows += [replace(row, needs=tuple(roles.together[key])) for row in found]
    words = dict(file.data.get("architectures", {}))
    ignored = {"": dict(file.data.get("ignore", {}))}
    for word, section in file.data.get("for", {}).items():
        if word not in words.values():
            raise file.header(f"for.{word}").error(f"`{word}` is no layout", hint=nearest(word, words.values()))
        own, also = {key: text for key, text in section.items() if key not in _INNER}, section.get("also", {})
        rows += [replace(row, only=word) for row in _plain(file, f"for.{word}", own, roles)]
        rows += [replace(row, only=word, written=False) for row in _plain(file, f"for.{word}.also", also, roles)]
        ignored[word] = dict(section.get("ignore", {}))
    rows += [replace(row, written=False) for row in _plain(file, "also", file.data.get("also", {}), roles)]
    for role in file.data.get("absent", {}):
        if role not in roles.roles:
            raise file.place("absent", role).error(f"role `{role}` is unknown", hint=nearest(role, roles.roles))
    modules = {row.name.removesuffix(".weight") for row in rows}
    for pair in file.data.get("joined", {}).items():
        for module in pair:
            if module not in modules:
                raise file.place("joined", pair[0]).error(f"`{module}` has no row", hint=nearest(module, modules))
    for word in file.data.get("shared_head", ()):
        if word not in words.values():
            raise file.place("", "shared_head").error(f"`{word}` is no layout", hint=nearest(word, words.values()))
    return Dialect(
        file, words, tuple(rows), dict(file.data.get("joined", {})), str(file.data.get("cache", "")),
        tuple(file.data.get("shared_head", ())), tuple(file.data.get("prefixes", ())), dims,
        dict(file.data.get("absent", {})), ignored,
    )  # fmt: skip


def _plain(file: TableFile, section: str, rows: Mapping[str, object], roles: Roles) -> list[DialectRow]:
    """The rows of a section that is no stage's."""
    return [_row(file, section, "layer" if "{l}" in key else "first", key, text, roles) for key, text in rows.items()]


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


def cut_of(expr: Expr) -> tuple[int, int] | None:
    """How tensor-parallel ranks share what `expr` makes: see `DialectRow.cut`."""
    if isinstance(expr, Ref):
        return None
    cuts = [cut_of(arg) for arg in expr.args]
    if expr.op in ("column", "vocab"):
        return 0, 1
    if expr.op == "row":
        return 1, 1
    if expr.op == "concat" and cuts[0]:
        return cuts[0][0], sum(blocks for _, blocks in filter(None, cuts))
    return (cuts[0][0] + (expr.op == "stack"), cuts[0][1]) if cuts[0] else None


def _stacked(expr: Expr, place: Place, outermost: bool) -> None:
    if not isinstance(expr, Call):
        return
    if expr.op == "stack" and not outermost:
        raise place.error("`stack` makes the tensor's first axis, so it stands outermost")
    for arg in expr.args:
        _stacked(arg, place, outermost=False)
