"""Translate a checkpoint of another dialect to Hugging Face's tensors.

Undoing the dialect's rows gives the rectangles of each role; laying out the architecture's rows over these gives the
tensors. One error lists all problems: tensors without a row, missing roles, contradictory shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from bridge.core.errors import PlanError, SourceError
from bridge.core.text import nearest, number
from bridge.core.values import TensorSpec
from bridge.tables.architectures.arch import INDEX, ArchTable, load_arch
from bridge.tables.architectures.match import Entry, architecture_of, check_counts, entries_of, numbered
from bridge.tables.architectures.mismatches import folded
from bridge.tables.dialects.dialect import Cut, Dialect, DialectRow
from bridge.tables.dialects.drafts import DraftLayers
from bridge.tables.dialects.layout import At, Roles, Where, lay_out, role_shapes, undo, whole
from bridge.tables.expressions.grammar import Call, Expr, Ref
from bridge.tables.expressions.ops import Rank
from bridge.tables.expressions.regions import Blocks, Refusal, Shape
from bridge.tables.expressions.shapes import row_shape

_DIGITS = r"\d{1,9}"  # Python refuses to convert thousands of digits
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Pattern = tuple[re.Pattern[str], DialectRow]


@dataclass(frozen=True)
class Translated:
    """One tensor with its Hugging Face name: stacked `blocks` of native tensors, each matrix transposed if `turned`."""

    spec: TensorSpec
    blocks: Blocks
    turned: bool = False


@dataclass(frozen=True)
class Native:
    """A tensor of the checkpoint under a row's name: of `shape`, beginning at value `first` of a stored tensor."""

    stored: str
    shape: Shape
    dtype: str
    first: int = 0


@dataclass
class Translator:
    """Translates one checkpoint. `problems`: text -> the names that it is about.

    `drafting`: how many of the config's layers, the last ones, are draft layers.
    """

    dialect: Dialect
    table: ArchTable
    architecture: str
    names: Mapping[str, object]
    drafting: int = 0
    native: dict[str, Native] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    _wrong: set[str] = field(default_factory=set)
    _known: dict[str, list[Pattern]] = field(default_factory=dict)
    _drafted: dict[str, Translated] = field(default_factory=dict)
    _shapes: dict[tuple[int, int], tuple[Mapping[str, Shape], Shape, Mapping[str, object]]] = field(
        default_factory=dict
    )

    @cached_property
    def drafts(self) -> DraftLayers:
        """The draft layers among the config's layers."""
        return DraftLayers(self.dialect, self.architecture, self._count("layers") - self.drafting, self.drafting)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The rows of the architecture that apply under the config."""
        prefix = "" if self.architecture in self.table.bare else self.table.prefix
        entries = entries_of(self.table, self.architecture, self.names, prefix)
        return tuple(entry for entry in entries if entry.row.expr and entry.expected)

    @cached_property
    def roles_by_layer(self) -> Mapping[int | None, frozenset[str]]:
        """The roles of each layer, and of the model (None)."""
        layers = range(self._count("layers"))
        by_layer: dict[int | None, set[str]] = {layer: set() for layer in (None, *layers)}
        for entry in self.entries:
            every = (None,) if "l" not in entry.row.index else layers if entry.layers is None else entry.layers
            for layer in every:
                by_layer[layer].update(entry.roles)
        return {layer: frozenset(roles) for layer, roles in by_layer.items()}

    @property
    def rows(self) -> list[DialectRow]:
        """The dialect's rows for this architecture."""
        word = self.dialect.architectures[self.architecture]
        return [row for row in self.dialect.rows if row.only in ("", word)]

    @cached_property
    def _patterns(self) -> list[Pattern]:
        return [(row_pattern(row.name), row) for row in self.rows]

    @cached_property
    def _reasons(self) -> list[tuple[re.Pattern[str], str]]:
        word = self.dialect.architectures[self.architecture]
        reasons = {**self.dialect.ignored[""], **self.dialect.ignored.get(word, {})}
        patterns = [(ignored_pattern(name), reason) for name, reason in reasons.items()]
        drafts = self.dialect.draft_layers if self.drafting else ()
        return [pair for pair in patterns if not any(map(pair[0].fullmatch, drafts))]

    def row_of(self, name: str) -> DialectRow | None:
        """The row of a stored tensor, whose `cut` says how ranks share it; None if no row has the name."""
        rows, at = self._candidates(self.drafts.bare(name))
        if not rows:
            return None
        layer = at.get("l", 0)  # stacked layers are all like the first
        return self._chosen(rows, layer if "{l}" in rows[0].name else None) or rows[0]

    def cut_of(self, name: str) -> Cut | None:
        """How ranks share a stored tensor; None if every rank has all of it, or no row has the name."""
        draft = self.drafts.row_of(name)
        row = draft[0] if draft else self.row_of(name)
        return row.cut if row else None

    def locate(self, specs: Iterable[TensorSpec]) -> dict[Where, Blocks]:
        """Return the rectangles of each role in the tensors of a checkpoint."""
        roles: dict[Where, Blocks] = {}
        for spec in specs:
            rows, at = self._candidates(self.drafts.bare(spec.name))
            if draft := self.drafts.row_of(spec.name):
                self._add_drafted(spec, draft[1])
            elif rows:
                self._add(spec, rows, at, roles)
            else:
                self._note_unplaced(
                    spec.name,
                    f"{self.dialect.file.name} has no row for it; add one, or a line under [ignore] that says why it "
                    "is not a weight of the model",
                )
        return roles

    def note_objects(self, objects: Mapping[str, str]) -> None:
        """Record objects that are not tensors of the model: name -> the module whose state it is, "" for none.

        A module that the dialect does not have is a problem.
        """
        kinds: dict[tuple[str, str], list[str]] = {}
        for name, module in objects.items():
            kind, of = (_NUMBER.sub("0", self.drafts.bare(text)) for text in (name, module))
            kinds.setdefault((kind, of), []).append(name)
        modules = {row.name.rpartition(".")[0]: None for row in self.rows}
        patterns = [row_pattern(module) for module in modules]
        for (kind, module), names in kinds.items():
            known = not module or any(pattern.fullmatch(module) for pattern in patterns)
            reason = self._reason(kind) or ("an object of the training program, no tensor" if known else None)
            if reason is None:
                text = f"the state of a module that {self.dialect.file.name} has no row for, and no line under [ignore]"
                self.problems.setdefault(text, []).extend(names)
            else:
                self.ignored.update(dict.fromkeys(names, reason))

    def _note_unplaced(self, name: str, otherwise: str) -> None:
        """Record why a stored tensor is not a weight of the model, or that no reason is given."""
        bare = self.drafts.bare(name)
        reason = self._reason(bare)
        if reason is None:
            refused = self.dialect.refused.items()
            self._problem(name, next((why for key, why in refused if row_pattern(key).fullmatch(bare)), otherwise))
        else:
            self.ignored[name] = reason

    def _reason(self, name: str) -> str | None:
        """The dialect's reason why the name is not a weight of the model."""
        return next((reason for pattern, reason in self._reasons if pattern.fullmatch(name)), None)

    def _candidates(self, name: str) -> tuple[list[DialectRow], dict[str, int]]:
        """The rows of a name, and its numbers; names that differ only in numbers, up to 40,000, are looked up once."""
        template = _NUMBER.sub("{}", name)
        if template not in self._known:
            self._known[template] = [pair for pair in self._patterns if pair[0].fullmatch(name)]
        candidates = self._known[template]
        match = candidates[0][0].fullmatch(name) if candidates else None
        numbers = match.groupdict().items() if match else ()
        return [row for _, row in candidates], {index: int(number) for index, number in numbers if number is not None}

    def _chosen(self, rows: Iterable[DialectRow], layer: int | None) -> DialectRow | None:
        """The first row whose roles the layer has."""
        present = self.roles_by_layer.get(layer, frozenset())
        return next((row for row in rows if present.issuperset(row.roles)), None)

    def _count(self, dim: str) -> int:
        count = self.names.get(dim, 0)
        assert isinstance(count, int)
        return count

    def _problem(self, name: str, text: str) -> None:
        self.problems.setdefault(text, []).append(name)

    def _add(self, spec: TensorSpec, rows: list[DialectRow], at: dict[str, int], roles: dict[Where, Blocks]) -> None:
        """Add the roles of one stored tensor, which may have one layer or all of them."""
        stacked, layers = "{l}" in rows[0].name and "l" not in at, range(self.drafts.layers)
        if stacked and (not spec.shape or spec.shape[0] != len(layers)):
            text = f"has shape {spec.shape}, the first axis of which should count {len(layers)} layers"
            self._problem(spec.name, text)
            self._wrong.update(numbered(row.name, layer, at.get("e")) for layer in layers for row in rows)
            return
        shape = spec.shape[1:] if stacked else spec.shape
        size = TensorSpec("", shape, spec.dtype).size
        for layer in layers if stacked else [at.get("l")]:
            row = self._chosen(rows, layer)
            if row is None or at.get("e", 0) >= max(1, self._count("experts")):
                self._note_unplaced(spec.name, f"a {self.architecture} of this config does not have it")
                return
            plain = numbered(row.name, layer, at.get("e"))
            if plain in self.native:
                self._problem(spec.name, f"is {plain}, which is also in {self.native[plain].stored}")
                continue
            self.native[plain] = Native(spec.name, shape, spec.dtype, size * (layer or 0) if stacked else 0)
            self._undo(plain, row, shape, (layer, at.get("e")), roles)

    def _add_drafted(self, spec: TensorSpec, name: str) -> None:
        """Add a tensor that only draft layers have; all norms of a checkpoint are stored in one way."""
        self.native[spec.name], stored = as_stored(spec, name)
        shift = self._count("centered") if len(spec.shape) == 1 else 0
        self._drafted[name] = replace(stored, blocks=tuple(replace(block, shift=shift) for block in stored.blocks))

    def _complete_drafts(self, tensors: dict[str, Translated]) -> None:
        """Add what only draft layers have, and copies of what they share with the model; note what is missing."""
        tensors |= self._drafted
        by_source = {tensor.blocks[0].source: tensor for tensor in tensors.values()}
        for source, name in self.drafts.shared():
            if tensor := by_source.get(source):
                tensors[name] = replace(tensor, spec=replace(tensor.spec, name=name))
        for own, name in self.drafts.own():
            if name not in tensors:
                self._problem(own, f"is missing; {name} needs it")

    def _undo(self, name: str, row: DialectRow, shape: Shape, at: At, roles: dict[Where, Blocks]) -> None:
        shapes, expected, names = self._expected(row, shape)
        if expected != shape:
            parts = ", ".join(f"{role} {shapes[role]}" for role in row.roles)
            self._wrong.add(name)
            self._problem(name, f"has shape {shape}, the config gives {expected}: {row.expr} of {parts}")
            return
        for where, blocks in undo(row.expr, (whole(name, shape, shapes),), shapes, names, at, row.place).items():
            if where in roles:
                self._problem(name, f"contains {where[0]}, which is also in {roles[where][0].source}")
            roles[where] = blocks

    def _expected(self, row: DialectRow, shape: Shape) -> tuple[Mapping[str, Shape], Shape, Mapping[str, object]]:
        """The shapes of a row's roles and of its tensor, and the names for its counts.

        Vocabularies are padded to the checkpoint's rows, whatever multiple its writer used.
        """
        key = id(row), shape[0] if shape and _pads(row.expr) else 0
        if key not in self._shapes:
            names = {**self.names, "vocab_multiple": max(1, key[1])} if key[1] else self.names
            shapes = role_shapes(self.table.roles.roles, row.roles, self.names)
            self._shapes[key] = shapes, row_shape(row.expr, shapes, names, row.place), names
        return self._shapes[key]

    def translate(self, roles: Roles) -> dict[str, Translated]:
        """Return every tensor of the architecture that the roles make; the caller resolves ties."""
        tensors: dict[str, Translated] = {}
        missing: dict[str, tuple[dict[str, None], dict[str, None]]] = {}  # row -> its tensors, tensors that need them
        tied = {tie.alias for tie in self.table.ties if tie.when.value(self.names)}
        for entry in self.entries:
            for name, layer, index in entry.placed():
                experts = range(self._count("experts")) if entry.row.stacks else (index,)
                lacking = [(role, e) for role in entry.roles for e in experts if (role, layer, e) not in roles]
                if not lacking:
                    self._lay_out(name, entry, (layer, index), roles, tensors)
                for role, expert in lacking if name not in tied else ():
                    row = self._home(role, layer)
                    homes, names = missing.setdefault(row, ({}, {}))
                    homes[numbered(row, layer, expert)] = names[name] = None
        for homes, names in missing.values():
            for home in (home for home in homes if home not in self._wrong):  # its wrong shape is a problem already
                self._problem(home, f"is missing; {folded(names)} needs it")
        self._complete_drafts(tensors)
        return tensors

    def _home(self, role: str, layer: int | None) -> str:
        """The name of the row for a role, preferably the one that is written."""
        present = self.roles_by_layer.get(layer, frozenset())
        rows = [row for row in self.rows if role in row.roles and present.issuperset(row.roles)]
        rows.sort(key=lambda row: not (row.written and present.issuperset(row.needs)))
        return rows[0].name if rows else role

    def _lay_out(self, name: str, entry: Entry, at: At, roles: Roles, tensors: dict[str, Translated]) -> None:
        assert entry.row.expr
        expr, turned = entry.row.expr, False
        if isinstance(expr, Call) and expr.op == "transpose":
            expr, turned = expr.args[0], True
        elif isinstance(expr, Call) and expr.op == "stack" and isinstance(inner := expr.args[0], Call):
            turned = inner.op == "transpose"  # of parts that may be of several tensors
            expr = replace(expr, args=inner.args) if turned else expr
        try:
            blocks = roles[expr.name, *at] if isinstance(expr, Ref) else lay_out(expr, roles, at, self.names, Rank())
        except Refusal as refusal:
            self._problem(name, str(refusal))
            return
        dtypes = {self.native[block.source].dtype for block in blocks}
        if len(dtypes) > 1:
            self._problem(name, f"its parts are {' and '.join(sorted(dtypes))}; save them in one dtype")
        tensors[name] = Translated(TensorSpec(name, entry.shape, min(dtypes)), blocks, turned)


def translator(
    dialect: Dialect, config: Mapping[str, object], dims: Mapping[str, int], drafting: int = 0
) -> Translator:
    """Return the translator of a checkpoint; `config` is Hugging Face's, `dims` of the dialect, from its own config.

    `drafting`: how many of the config's layers, the last ones, are draft layers.
    """
    architecture = architecture_of(config)
    table = load_arch(architecture)
    if table is None or architecture not in dialect.architectures:
        raise PlanError(
            f"{dialect.file.name} has no layout for {architecture}; {nearest(architecture, dialect.architectures)}"
        )
    lacking = sorted(dialect.dims.keys() - dims.keys())
    assert not lacking, f"the reader does not give {lacking}"
    names = {**table.names(config), **dims}
    check_counts(table, names)
    return Translator(dialect, table, architecture, names, drafting)


def translate(
    dialect: Dialect,
    config: Mapping[str, object],
    dims: Mapping[str, int],
    specs: Iterable[TensorSpec],
    where: str,
    objects: Mapping[str, str] | None = None,
    drafting: int = 0,
) -> tuple[dict[str, Translated], Translator]:
    """Return the tensors of a checkpoint by Hugging Face's names, and its translator; SourceError lists all problems.

    objects: objects among the tensors that are not the model's, with the module whose state they are.
    """
    translation = translator(dialect, config, dims, drafting)
    translation.note_objects(objects or {})
    tensors = translation.translate(translation.locate(specs))
    if translation.problems:
        own = {text: dict.fromkeys(map(translation.drafts.shown, n)) for text, n in translation.problems.items()}
        lines = [f"{folded(names)}: {text}" for text, names in own.items()]
        head = f"{where} is not a {translation.architecture} of this config: {number(len(lines), 'problem')}"
        raise SourceError("\n  ".join([head, *lines]))
    return tensors, translation


def as_stored(spec: TensorSpec, shown: str) -> tuple[Native, Translated]:
    """A stored tensor, and the same under the name `shown`."""
    shape = (spec.shape[0], math.prod(spec.shape[1:])) if len(spec.shape) > 1 else spec.shape
    same = whole(spec.name, shape, {spec.name: shape})
    return Native(spec.name, shape, spec.dtype), Translated(replace(spec, name=shown), (same,))


def row_pattern(name: str) -> re.Pattern[str]:
    """A row's name as a pattern; the layer is optional, for tensors with a leading axis of layers."""
    parts = [f"(?P<{part}>{_DIGITS})" if at % 2 else re.escape(part) for at, part in enumerate(INDEX.split(name))]
    return re.compile("".join(parts).replace(rf"(?P<l>{_DIGITS})\.", rf"(?:(?P<l>{_DIGITS})\.)?"))


def ignored_pattern(name: str) -> re.Pattern[str]:
    """A name under [ignore] as a pattern: `mtp.*` is everything below `mtp`."""
    stem = name.removesuffix(".*")
    return row_pattern(name) if stem == name else re.compile(row_pattern(stem).pattern + r"\..+")


def _pads(expr: Expr) -> bool:
    return isinstance(expr, Call) and (expr.op == "pad" or any(_pads(arg) for arg in expr.args))
