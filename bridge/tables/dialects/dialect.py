"""Read `mappings/dialects/*.toml`: names and layouts of roles in other checkpoints.

[first] [layer] [last]         rows, written if a layer (or the model) has all their roles
[layer.gated]                  ... and all roles of that set of roles.toml
[for.qwen3]                    rows of one layout, named in [architectures]
[also] [for.qwen3.also]        other names: read, not written
[absent]                       roles that the dialect does not have -> why
[ignore] [for.qwen3.ignore]    tensors that are not weights of the model -> why; `mtp.*` is everything below `mtp`
[drafts]                       beginnings of names of draft layers, numbered from 0 -> those of rows of other layers
[for.glm.drafts]               what only draft layers have -> its name in the layer; the rest are rows above. Without
                               `{l}`: the model's own tensor, of which Hugging Face has a copy in each of them
[refused]                      weights that no row can read -> why, and what to do

`files`, before the first header, says that a Hugging Face directory with config.json may use the dialect: in weight
files of the usual names, or of those listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import NamedTuple

from bridge.core.errors import TableError
from bridge.core.mappings import Place, TableFile, find_table_file, read_table, table_files
from bridge.core.parsing.file_cache import cached_by_file
from bridge.core.text import nearest
from bridge.tables.architectures.arch import INDEX, Layouts, layouts
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.roles import Roles, load_roles
from bridge.tables.expressions.grammar import Call, Expr, Ref, parse_row, roles_in
from bridge.tables.expressions.ops import ALL

STAGES = ("first", "layer", "last")
_HEAD = ("cache", "shared_head", "prefixes", "files", "architectures", "follows", "models", "joined", "dims")
_INNER = ("also", "ignore", "drafts")  # sections of a layout besides its rows
_KEYS = (*_HEAD, *STAGES, "for", "also", "absent", "ignore", "refused", "drafts")
_COLUMN = re.compile(r"column\((.+)\)")


class Cut(NamedTuple):
    """How tensor-parallel ranks share a tensor: along `axis`, each of its `blocks` equal parts separately.

    A gated linear_fc1 has two blocks: every rank holds its rows of the gate, then its rows of up.
    """

    axis: int
    blocks: int = 1


class DraftRow(NamedTuple):
    """A tensor that only draft layers have: its name in a layer of Hugging Face, and how ranks share it."""

    within: str
    cut: Cut | None


@dataclass(frozen=True)
class DialectRow:
    """A tensor of one rank's file. `stage`: "first", "layer" (of every stage) or "last".

    `only`: its layout, "" for all. `written`: False for another name, which is only read. `needs`: roles that a layer
    must have besides to have it written, those of its section.
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
        """Whether the tensor has a leading axis of experts."""
        return isinstance(self.expr, Call) and self.expr.op == "stack"

    @property
    def cut(self) -> Cut | None:
        """How tensor-parallel ranks share it; None if every rank has all of it."""
        return cut_of(self.expr)


@dataclass(frozen=True)
class Dialect:
    """The names and layouts of roles in one kind of checkpoint.

    `architectures`: architecture -> name of its layout. `joined`: module -> the module that it may be joined with.
    `cache`: the module of K and V scales. `shared_head`: layouts whose tied head is not written. `prefixes`: optional
    beginnings of names. `dims`: numbers from the checkpoint's own config -> their meaning. `absent`: roles of its
    architectures that it does not have -> why. `ignored`: tensors that are not weights: "" or a layout -> name ->
    reason. `refused`: weights that no row can read -> why. `files`: weight files besides those of Hugging Face, in a
    directory with config.json; None for checkpoints of another kind. `follows`: "all" or an architecture -> fields of
    config.json, besides those of rows and rotary ones, that it expresses or whose values the target judges. `drafts`:
    layouts with draft layers -> name of a tensor that only these have -> what it is. `draft_layers`: beginnings of
    names of draft layers with a number of their own -> those of rows; without any, they are layers among the others.
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
    follows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    drafts: Mapping[str, Mapping[str, DraftRow]] = field(default_factory=dict)
    draft_layers: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its file: `megatron`."""
        return PurePath(self.file.name).stem

    def rows_of(self, stage: str, present: frozenset[str], word: str = "") -> Iterator[DialectRow]:
        """Yield in order the rows of layout `word` for a layer (or first or last stage) with the roles `present`."""
        for row in self.rows:
            listed = row.written and row.stage == stage and row.only in ("", word)
            if listed and present.issuperset((*row.roles, *row.needs)):
                yield row

    def bare(self, name: str) -> str:
        """Return a tensor's name without prefixes; there may be several: `model.module.` of NeMo 1's O2."""
        while prefix := next((prefix for prefix in self.prefixes if name.startswith(prefix)), ""):
            name = name.removeprefix(prefix)
        return name

    def draft_rows(self, architecture: str) -> Mapping[str, DraftRow]:
        """The tensors that only draft layers have; {} if the architecture has none here."""
        return self.drafts.get(self.architectures.get(architecture, ""), {})

    def draft_number(self, name: str) -> int | None:
        """The number from 0 of the draft layer that a stored tensor belongs to by its name; None for any other."""
        begins = {draft.partition("{l}")[0] + "{l}" for draft in self.draft_layers}
        matches = (_begun(self.bare(name), begin) for begin in begins)
        return next((int(match[1]) for match in matches if match), None)

    def after_last(self, name: str, layers: int) -> str:
        """The name without prefixes; that of a draft layer as of the layer after the last of `layers`."""
        name = self.bare(name)
        matches = ((_begun(name, draft), layer) for draft, layer in self.draft_layers.items())
        named = (f"{layer.format(l=int(match[1]) + layers)}.{match[2]}" for match, layer in matches if match)
        return next(named, name)

    def as_draft(self, name: str, layers: int) -> str:
        """Invert `after_last`, in the names that are written; other names stay."""
        matches = ((_begun(name, layer), draft) for draft, layer in self.draft_layers.items())
        later = ((match, draft) for match, draft in matches if match and int(match[1]) >= layers)
        return next((f"{draft.format(l=int(match[1]) - layers)}.{match[2]}" for match, draft in later), name)

    def followed(self, architecture: str) -> frozenset[str]:
        """The fields of an architecture's config that its output expresses."""
        return frozenset((*self.follows.get("all", ()), *self.follows.get(architecture, ())))

    def shares_head(self, matched: Matched, pp: int = 1) -> bool:
        """Whether no head is written: it is tied, and one pipeline stage has embedding and head."""
        word = self.architectures[matched.architecture]
        return word in self.shared_head and bool(matched.tied) and pp == 1


def load_dialect(name: str) -> Dialect:
    """Read `mappings/dialects/<name>.toml`, and the layouts that architectures' tables give for it.

    >>> load_dialect("trtllm").architectures["Qwen2ForCausalLM"]
    'qwen'
    """
    path = find_table_file("dialects", name)
    if path is None:
        raise TableError(f"dialect {name!r} is unknown; {nearest(name, dialect_names())}")
    return with_layouts(_read_dialect(path), layouts(name))


@cached_by_file
def _read_dialect(path: Path) -> Dialect:
    return parse_dialect(read_table(path), load_roles())


def dialect_names() -> list[str]:
    """Names of our dialects and of those from entry points, sorted."""
    return [path.stem for path in table_files("dialects")]


def with_layouts(dialect: Dialect, added: Layouts) -> Dialect:
    """Return the dialect with the layouts that architectures' own tables give."""
    words = dict(dialect.architectures)
    known = sorted(set(words.values()))
    for architecture, (word, place) in added.items():
        if words.setdefault(architecture, word) != word:
            raise place.error(f"{architecture} is `{words[architecture]}` in {dialect.file.name}")
        _known(place, word, known, f"`{word}` is not a layout of {dialect.file.name}")
    return replace(dialect, architectures=words)


def parse_dialect(file: TableFile, roles: Roles) -> Dialect:
    """Parse one dialect; TableError names file, line and row."""
    file.known_keys(_KEYS)
    words, joined, dims, absent = (file.texts(key) for key in ("architectures", "joined", "dims", "absent"))
    roles = replace(roles, dims={**roles.dims, **dims})
    rows, ignored, drafts = _staged(file, roles), {"": file.texts("ignore")}, {}
    for word in file.section("for"):
        _known(file.header(f"for.{word}"), word, words.values(), f"`{word}` is not a layout")
        section = f"for.{word}"
        rows += [replace(row, only=word) for row in _plain(file, section, roles, _INNER)]
        rows += [replace(row, only=word, written=False) for row in _plain(file, f"{section}.also", roles)]
        ignored[word] = file.texts(f"{section}.ignore")
        drafts[word] = {name: _draft_row(text) for name, text in file.texts(f"{section}.drafts").items()}
    rows += [replace(row, written=False) for row in _plain(file, "also", roles)]
    for role in absent:
        _known(file.place("absent", role), role, roles.roles, f"role `{role}` is unknown")
    modules = {row.name.removesuffix(".weight") for row in rows}
    for pair in joined.items():
        for module in pair:
            _known(file.place("joined", pair[0]), module, modules, f"`{module}` has no row")
    for word in file.words("shared_head"):
        _known(file.place("", "shared_head"), word, words.values(), f"`{word}` is not a layout")
    return Dialect(
        file, words, tuple(rows), joined, str(file.data.get("cache", "")), file.words("shared_head"),
        file.words("prefixes"), dims, absent, ignored, file.texts("refused"), _files(file, dims),
        file.section("follows"), drafts, file.texts("drafts"),
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
            _known(file.header(section), key, roles.together, f"`{key}` is not a set of roles")
            inner_rows = [_row(file, section, stage, inner, text, roles) for inner, text in value.items()]
            rows += [replace(row, needs=tuple(roles.together[key])) for row in inner_rows]
    return rows


def _known(place: Place, word: str, known: Iterable[str], problem: str) -> None:
    if word not in (names := list(known)):
        raise place.error(problem, hint=nearest(word, names))


def _files(file: TableFile, dims: Mapping[str, str]) -> tuple[str, ...] | None:
    """`files` of the head. A config.json gives no dim except the padding of its vocabulary, by the number of rows."""
    if "files" not in file.data:
        return None
    names = file.words("files")
    if any("/" in name for name in names):
        raise file.place("", "files").error("`files` lists names of weight files", hint='files = ["lit_model.pth"]')
    for dim in dims:
        if dim != "vocab_multiple":
            raise file.place("dims", dim).error(f"no config.json gives `{dim}`, and `files` allows no other source")
    return names


def _draft_row(text: str) -> DraftRow:
    match = _COLUMN.fullmatch(text)
    return DraftRow(match[1], Cut(0)) if match else DraftRow(text, None)


def _begun(name: str, begin: str) -> re.Match[str] | None:
    """Match a name that begins so, with a number for `{l}`: the number, and the rest of the name."""
    before, _, after = map(re.escape, begin.partition("{l}"))
    return re.fullmatch(rf"{before}(\d{{1,9}}){after}\.(.+)", name)


def _plain(file: TableFile, section: str, roles: Roles, inner: tuple[str, ...] = ()) -> list[DialectRow]:
    """The rows of a section that is not a stage's, without its sections `inner`."""
    rows = {key: text for key, text in file.section(section).items() if key not in inner}
    return [_row(file, section, "layer" if "{l}" in key else "first", key, text, roles) for key, text in rows.items()]


def _row(file: TableFile, section: str, stage: str, key: str, text: object, roles: Roles) -> DialectRow:
    place = file.place(section, key)
    if not isinstance(text, str):
        raise place.error(f"a row's value is a string, not {text!r}", hint='"a.{l}.weight" = "row(attn.o.weight)"')
    expr = parse_row(text, place, roles.roles, roles.dims, ALL)
    row = DialectRow(key, expr, stage, place)
    _stacked(expr, place, outermost=True)
    named = {*INDEX.findall(key)}
    if unknown := named - {*roles.index}:
        raise place.error(f"index `{min(unknown)}` is unknown", hint=nearest(min(unknown), roles.index))
    for role in row.roles:
        if row.stacks and "e" not in roles.indices(role):
            raise place.error(f"`stack` joins experts, and role `{role}` does not belong to an expert")
        indices = {*roles.indices(role)} - ({"e"} if row.stacks else set())
        if indices != named or (stage == "layer") != ("l" in named):
            shown = " and ".join("{" + index + "}" for index in sorted(indices)) or "no index"
            raise place.error(f"role `{role}` has {shown}; the row's name or its section [{stage}] does not fit")
    return row


def cut_of(expr: Expr) -> Cut | None:
    """How tensor-parallel ranks share the tensor of `expr`: see `DialectRow.cut`."""
    if isinstance(expr, Ref):
        return None
    cuts = [cut_of(arg) for arg in expr.args]
    if expr.op in ("column", "vocab"):
        return Cut(0)
    if expr.op == "row":
        return Cut(1)
    first = cuts[0]
    if first and expr.op == "concat":
        return Cut(first.axis, sum(cut.blocks for cut in cuts if cut))
    return Cut(first.axis + 1, first.blocks) if first and expr.op == "stack" else first


def _stacked(expr: Expr, place: Place, outermost: bool) -> None:
    if not isinstance(expr, Call):
        return
    if expr.op == "stack" and not outermost:
        raise place.error("`stack` makes the tensor's first axis, so it must be outermost")
    for arg in expr.args:
        _stacked(arg, place, outermost=False)
