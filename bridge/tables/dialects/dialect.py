"""Reads `mappings/dialects/*.toml`: how others than Hugging Face spell the roles; must never look at a checkpoint.

[first] [layer] [last]         rows, written where a layer (or the model) holds all their roles
[layer.gated]                  and all of that set of roles.toml
[for.qwen3]                    rows of one layout, as [architectures] calls it
[also] [for.qwen3.also]        other spellings: read, not written
[absent]                       roles that it cannot say -> why
[ignore] [for.qwen3.ignore]    tensors that are none of the model's weights -> why; `mtp.*` is all that lies below `mtp`
[refused]                      tensors that are, and that no row can read -> why, and what to do

`files` stands before them where a directory of Hugging Face's, with its config.json, may be spelled so: in files of its
names, or of those listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from bridge.errors import TableError, nearest
from bridge.tables.arch import Layouts, Roles, layouts, load_roles
from bridge.tables.files import Place, TableFile, find_table_file, parse_table, read_table, table_files
from bridge.tables.grammar import Call, Expr, Ref, parse_row, roles_in
from bridge.tables.ops import ALL

if TYPE_CHECKING:
    from bridge.tables.match import Matched

STAGES = ("first", "layer", "last")
_HEAD = ("cache", "shared_head", "prefixes", "files", "architectures", "joined", "dims")
_INNER = ("also", "ignore")  # what a layout's own section may hold besides rows
_KEYS = (*_HEAD, *STAGES, "for", "also", "absent", "ignore", "refused")
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
    why, "" or a layout's word -> name -> reason. `refused`: those that no row can read -> why. `files`: weight files
    that it has besides those of Hugging Face, in a directory with config.json; None where it lies in a checkpoint of
    another kind.
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
    refused: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The word of its file: `megatron`."""
        return PurePath(self.file.name).stem

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

    def bare(self, name: str) -> str:
        """Return a tensor's name without prefixes, of which there may be several: `model.module.` of NeMo 1's O2."""
        while found := next((prefix for prefix in self.prefixes if name.startswith(prefix)), ""):
            name = name.removeprefix(found)
        return name

    def shares_head(self, matched: Matched, pp: int = 1) -> bool:
        """True where no head is written: the layout takes a tied one from the embedding, and one stage holds both."""
        word = self.architectures[matched.architecture]
        return word in self.shared_head and bool(matched.tied) and pp == 1


def load_dialect(name: str) -> Dialect:
    """Read `mappings/dialects/<name>.toml`, and what tables of architectures say of their layout in it.

    >>> load_dialect("trtllm").architectures["Qwen2ForCausalLM"]
    'qwen'
    """
    path = find_table_file("dialects", name)
    if path is None:
        raise TableError(f"dialect {name!r} is unknown; {nearest(name, dialect_names())}")
    return with_layouts(parse_dialect(read_table(path), load_roles()), layouts(name))


def dialect_names() -> list[str]:
    """Names of the dialects that ship and of those that entry points add, sorted."""
    return [path.stem for path in table_files("dialects")]


def with_layouts(dialect: Dialect, found: Layouts) -> Dialect:
    """Return the dialect with the architectures that have a layout in it by their own tables."""
    words = dict(dialect.architectures)
    known = sorted(set(words.values()))
    for architecture, (word, place) in found.items():
        if words.setdefault(architecture, word) != word:
            raise place.error(f"{architecture} is `{words[architecture]}` in {dialect.file.name}")
        _known(place, word, known, f"`{word}` is no layout of {dialect.file.name}")
    return replace(dialect, architectures=words)


def parse_dialect(file: TableFile | str, roles: Roles, name: str = "dialect") -> Dialect:
    """Parse one dialect; TableError names file, line and row."""
    file = parse_table(file, name) if isinstance(file, str) else file
    file.known_keys(_KEYS)
    words, joined, dims, absent = (file.texts(key) for key in ("architectures", "joined", "dims", "absent"))
    roles = replace(roles, dims={**roles.dims, **dims})
    rows, ignored = _staged(file, roles), {"": file.texts("ignore")}
    for word in file.section("for"):
        _known(file.header(f"for.{word}"), word, words.values(), f"`{word}` is no layout")
        section = f"for.{word}"
        own = {key: text for key, text in file.section(section).items() if key not in _INNER}
        rows += [replace(row, only=word) for row in _plain(file, section, own, roles)]
        rows += [replace(row, only=word, written=False) for row in _also(file, f"{section}.also", roles)]
        ignored[word] = file.texts(f"{section}.ignore")
    rows += [replace(row, written=False) for row in _also(file, "also", roles)]
    for role in absent:
        _known(file.place("absent", role), role, roles.roles, f"role `{role}` is unknown")
    modules = {row.name.removesuffix(".weight") for row in rows}
    for pair in joined.items():
        for module in pair:
            _known(file.place("joined", pair[0]), module, modules, f"`{module}` has no row")
    for word in file.words("shared_head"):
        _known(file.place("", "shared_head"), word, words.values(), f"`{word}` is no layout")
    return Dialect(
        file, words, tuple(rows), joined, str(file.data.get("cache", "")), file.words("shared_head"),
        file.words("prefixes"), dims, absent, ignored, file.texts("refused"), _files(file, dims),
    )  # fmt: skip


def _staged(file: TableFile, roles: Roles) -> list[DialectRow]:
    """The rows of [first], [layer] and [last]."""
    rows: list[DialectRow] = []
    for stage in STAGES:
        for key, value in file.section(stage).items():
            if not isinstance(value, dict):
                rows.append(_row(file, stage, stage, key, value, roles))
                continue
            section = f"{stage}.{key}"
            _known(file.header(section), key, roles.together, f"`{key}` is no set of roles")
            found = [_row(file, section, stage, inner, text, roles) for inner, text in value.items()]
            rows += [replace(row, needs=tuple(roles.together[key])) for row in found]
    return rows


def _known(place: Place, word: str, known: Iterable[str], said: str) -> None:
    if word not in (names := list(known)):
        raise place.error(said, hint=nearest(word, names))


def _files(file: TableFile, dims: Mapping[str, str]) -> tuple[str, ...] | None:
    """The head's `files`. A config.json says no dim but, by the rows of its vocabulary, what that is padded to."""
    if "files" not in file.data:
        return None
    found = file.words("files")
    if any("/" in name for name in found):
        raise file.place("", "files").error("`files` lists names of weight files", hint='files = ["lit_model.pth"]')
    for dim in dims:
        if dim != "vocab_multiple":
            raise file.place("dims", dim).error(f"no config.json says `{dim}`, and `files` says that there is no other")
    return found


def _also(file: TableFile, section: str, roles: Roles) -> list[DialectRow]:
    return _plain(file, section, file.section(section), roles)


def _plain(file: TableFile, section: str, rows: Mapping[str, object], roles: Roles) -> list[DialectRow]:
    """The rows of a section that is no stage's."""
    return [_row(file, section, "layer" if "{l}" in key else "first", key, text, roles) for key, text in rows.items()]


def _row(file: TableFile, section: str, stage: str, key: str, text: object, roles: Roles) -> DialectRow:
    place = file.place(section, key)
    if not isinstance(text, str):
        raise place.error(f"a row's value is a string, not {text!r}", hint='"a.{l}.weight" = "row(attn.o.weight)"')
    expr = parse_row(text, place, dict(roles.roles), roles.dims, ALL)
    row = DialectRow(key, expr, stage, place)
    _stacked(expr, place, outermost=True)
    named = {*_INDEX.findall(key)}
    if unknown := named - {*roles.index}:
        raise place.error(f"index `{min(unknown)}` is unknown", hint=nearest(min(unknown), roles.index))
    for role in row.roles:
        if row.stacks and "e" not in roles.indices(role):
            raise place.error(f"`stack` puts experts under each other, and role `{role}` is none of an expert")
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
