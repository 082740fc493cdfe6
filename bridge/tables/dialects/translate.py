"""Spells a checkpoint of another dialect in Hugging Face's names: every tensor as rectangles of its; reads no weight.

The dialect's rows are undone, which says where each role lies, and the architecture's rows are laid out over that. All
that does not fit is told in one error: tensors that no row knows, roles that are not there, shapes that contradict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from bridge.errors import PlanError, SourceError, nearest
from bridge.tables.arch import ArchTable, load_arch
from bridge.tables.dialect import Dialect, DialectRow
from bridge.tables.fit import folded
from bridge.tables.grammar import Call, Expr, Ref
from bridge.tables.match import Entry, architecture_of, entries_of, sane
from bridge.tables.ops import Rank
from bridge.tables.rectangles import Blocks, Refusal, Shape
from bridge.tables.rows import row_shape
from bridge.tables.slices import Where, lay_out, role_shapes, undo, whole
from bridge.values import TensorSpec

_INDEX = re.compile(r"\{(\w+)\}")
_DIGITS = r"\d{1,9}"  # Python refuses to make a number of thousands
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Pattern = tuple[re.Pattern[str], DialectRow]


@dataclass(frozen=True)
class Spelled:
    """One tensor in Hugging Face's names: `blocks` of native tensors under each other, then turned if `turned`."""

    spec: TensorSpec
    blocks: Blocks
    turned: bool = False


@dataclass(frozen=True)
class Native:
    """A tensor of the checkpoint under the name that a row has: `first` values into a stored one, of that shape."""

    stored: str
    shape: Shape
    dtype: str
    first: int = 0


@dataclass
class Speller:
    """Spells one checkpoint. `problems`: what is wrong -> the names that it is wrong with."""

    dialect: Dialect
    table: ArchTable
    architecture: str
    names: Mapping[str, object]
    native: dict[str, Native] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    _wrong: set[str] = field(default_factory=set)
    _known: dict[str, list[Pattern]] = field(default_factory=dict)
    _shapes: dict[tuple[int, int], tuple[Mapping[str, Shape], Shape, Mapping[str, object]]] = field(
        default_factory=dict
    )

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The rows of the architecture that hold under the config."""
        strip = self.table.prefix if self.architecture in self.table.bare else ""
        found = entries_of(self.table, self.architecture, self.names, strip)
        return tuple(entry for entry in found if entry.row.expr and entry.expected)

    @cached_property
    def held(self) -> Mapping[int | None, frozenset[str]]:
        """The roles of each layer, and of the model (None)."""
        return held_roles(self.entries, self._count("layers"))

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
        return [(ignored_pattern(name), reason) for name, reason in reasons.items()]

    def row_of(self, name: str) -> DialectRow | None:
        """The row of a stored tensor, whose `cut` says how ranks share it; None for one that no row knows."""
        name = self.dialect.bare(name)
        found = self._candidates(name)
        if not found:
            return None
        match = found[0][0].fullmatch(name)
        assert match
        layer = match.groupdict().get("l") or 0  # of stacked layers the first speaks for all
        return self._chosen(found, int(layer) if "{l}" in found[0][1].name else None) or found[0][1]

    def take(self, specs: Iterable[TensorSpec]) -> dict[Where, Blocks]:
        """Return where each role lies in the tensors of a checkpoint."""
        roles: dict[Where, Blocks] = {}
        for spec in specs:
            name = self.dialect.bare(spec.name)
            found = self._candidates(name)
            if found:
                self._add(spec, name, found, roles)
            else:
                self._note_unplaced(
                    spec.name,
                    f"{self.dialect.file.name} has no row for it; add one, or a line under [ignore] that says why it "
                    "is none of the model's weights",
                )
        return roles

    def note_objects(self, objects: Mapping[str, str]) -> None:
        """Note what lies among the tensors and is none of the model's: name -> the module that it is the state of.

        A module that the dialect does not know is a problem. "": of none.
        """
        kinds: dict[tuple[str, str], list[str]] = {}
        for name, module in objects.items():
            kind, of = (_NUMBER.sub("0", self.dialect.bare(text)) for text in (name, module))
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
        """Note why a stored tensor is none of the model's weights, or that nobody said so."""
        bare = self.dialect.bare(name)
        reason = self._reason(bare)
        if reason is None:
            refused = self.dialect.refused.items()
            self._problem(name, next((why for key, why in refused if row_pattern(key).fullmatch(bare)), otherwise))
        else:
            self.ignored[name] = reason

    def _reason(self, name: str) -> str | None:
        """Why what bears the name is none of the model's weights, as the dialect says."""
        return next((reason for pattern, reason in self._reasons if pattern.fullmatch(name)), None)

    def _candidates(self, name: str) -> list[Pattern]:
        """The rows with this name. Names that differ in numbers only are looked for once: there are 40,000 of them."""
        template = _NUMBER.sub("{}", name)
        if template not in self._known:
            self._known[template] = [found for found in self._patterns if found[0].fullmatch(name)]
        return self._known[template]

    def _chosen(self, found: list[Pattern], layer: int | None) -> DialectRow | None:
        """The row among those of one name whose roles the layer holds."""
        held = self.held.get(layer, frozenset())
        return next((row for _, row in found if held.issuperset(row.roles)), None)

    def _count(self, dim: str) -> int:
        count = self.names.get(dim, 0)
        assert isinstance(count, int)
        return count

    def _layers(self) -> range:
        return range(self._count("layers"))

    def _problem(self, name: str, text: str) -> None:
        self.problems.setdefault(text, []).append(name)

    def _add(self, spec: TensorSpec, name: str, found: list[Pattern], roles: dict[Where, Blocks]) -> None:
        """Note the roles of one stored tensor, which may hold a layer or all of them."""
        match = found[0][0].fullmatch(name)
        assert match
        at = {index: int(number) for index, number in match.groupdict().items() if number is not None}
        stacked, layers = "{l}" in found[0][1].name and "l" not in at, self._layers()
        if stacked and (not spec.shape or spec.shape[0] != len(layers)):
            text = f"has shape {spec.shape}, the first axis of which should count {len(layers)} layers"
            self._problem(spec.name, text)
            self._wrong.update(_numbered(row.name, layer, at.get("e")) for layer in layers for _, row in found)
            return
        shape = spec.shape[1:] if stacked else spec.shape
        size = TensorSpec("", shape, spec.dtype).size
        for layer in layers if stacked else [at.get("l")]:
            row = self._chosen(found, layer)
            if row is None or at.get("e", 0) >= max(1, self._count("experts")):
                self._note_unplaced(spec.name, f"the config of {self.architecture} has no place for it")
                return
            plain = _numbered(row.name, layer, at.get("e"))
            if plain in self.native:
                self._problem(spec.name, f"stands for {plain}, which {self.native[plain].stored} holds as well")
                continue
            self.native[plain] = Native(spec.name, shape, spec.dtype, size * (layer or 0) if stacked else 0)
            self._undo(plain, row, shape, (layer, at.get("e")), roles)

    def _undo(
        self, name: str, row: DialectRow, shape: Shape, at: tuple[int | None, int | None], roles: dict[Where, Blocks]
    ) -> None:
        shapes, expected, names = self._expected(row, shape)
        if expected != shape:
            said = ", ".join(f"{role} {shapes[role]}" for role in row.roles)
            self._wrong.add(name)
            self._problem(name, f"has shape {shape}, the config makes it {expected}: {row.expr} of {said}")
            return
        for where, blocks in undo(row.expr, (whole(name, shape, shapes),), shapes, names, at, row.place).items():
            if where in roles:
                self._problem(name, f"holds {where[0]}, which {roles[where][0].source} holds as well")
            roles[where] = blocks

    def _expected(self, row: DialectRow, shape: Shape) -> tuple[Mapping[str, Shape], Shape, Mapping[str, object]]:
        """The shapes of a row's roles and of its tensor, and the names that its counts are computed from.

        Vocabularies are padded to what the checkpoint has, whatever multiple its writer was told.
        """
        key = id(row), shape[0] if shape and _pads(row.expr) else 0
        if key not in self._shapes:
            names = {**self.names, "vocab_multiple": max(1, key[1])} if key[1] else self.names
            shapes = role_shapes(self.table.roles.roles, row.roles, self.names)
            self._shapes[key] = shapes, row_shape(row.expr, shapes, names, row.place), names
        return self._shapes[key]

    def spell(self, roles: Mapping[Where, Blocks]) -> dict[str, Spelled]:
        """Return every tensor of the architecture that the roles make; ties are left to who reads the config."""
        found: dict[str, Spelled] = {}
        missing: dict[str, tuple[dict[str, None], dict[str, None]]] = {}  # row -> tensors of it, what lacks them
        tied = {tie.alias for tie in self.table.ties if tie.when.value(self.names)}
        for entry in self.entries:
            for name, layer, number in entry.placed():
                experts = range(self._count("experts")) if entry.row.stacks else (number,)
                lacking = [(role, e) for role in entry.roles for e in experts if (role, layer, e) not in roles]
                if not lacking:
                    self._lay(name, entry, (layer, number), roles, found)
                for role, expert in lacking if name not in tied else ():
                    row = self._home(role, layer)
                    homes, names = missing.setdefault(row, ({}, {}))
                    homes[_numbered(row, layer, expert)] = names[name] = None
        for homes, names in missing.values():
            for home in (home for home in homes if home not in self._wrong):  # that its shape is wrong was told
                self._problem(home, f"is missing; {folded(names)} would be made of it")
        return found

    def _home(self, role: str, layer: int | None) -> str:
        """The name of the row that would hold a role."""
        held = self.held.get(layer, frozenset())
        rows = [row for row in self.rows if role in row.roles and held.issuperset(row.roles)]
        rows.sort(key=lambda row: not (row.written and held.issuperset(row.needs)))
        return rows[0].name if rows else role

    def _lay(
        self,
        name: str,
        entry: Entry,
        at: tuple[int | None, int | None],
        roles: Mapping[Where, Blocks],
        found: dict[str, Spelled],
    ) -> None:
        assert entry.row.expr
        expr = entry.row.expr
        turned = isinstance(expr, Call) and expr.op == "transpose"
        expr = expr.args[0] if turned and isinstance(expr, Call) else expr
        try:
            blocks = roles[expr.name, *at] if isinstance(expr, Ref) else lay_out(expr, roles, at, self.names, Rank())
        except Refusal as refusal:
            self._problem(name, str(refusal))
            return
        dtypes = {self.native[block.source].dtype for block in blocks}
        if len(dtypes) > 1:
            self._problem(name, f"its parts are {' and '.join(sorted(dtypes))}; save them alike")
        found[name] = Spelled(TensorSpec(name, entry.shape, min(dtypes)), blocks, turned)

    def told(self) -> list[str]:
        """The problems, a line each: names folded, what is wrong, what to do."""
        return [f"{folded(dict.fromkeys(names))}: {text}" for text, names in self.problems.items()]


def speller(dialect: Dialect, config: Mapping[str, object], dims: Mapping[str, int]) -> Speller:
    """Return the speller of one checkpoint.

    config: Hugging Face's.  dims: of the dialect, as the checkpoint's own configuration has them.
    """
    architecture = architecture_of(config)
    table = load_arch(architecture)
    if table is None or architecture not in dialect.architectures:
        raise PlanError(
            f"{dialect.file.name} has no layout for {architecture}; {nearest(architecture, dialect.architectures)}"
        )
    lacking = sorted(dialect.dims.keys() - dims.keys())
    assert not lacking, f"the reader gives {lacking}"
    names = {**table.names(config), **dims}
    sane(table, names)
    return Speller(dialect, table, architecture, names)


def spelled(
    dialect: Dialect,
    config: Mapping[str, object],
    dims: Mapping[str, int],
    specs: Iterable[TensorSpec],
    where: str,
    objects: Mapping[str, str] | None = None,
) -> tuple[dict[str, Spelled], Speller]:
    """Return the tensors of a checkpoint in Hugging Face's names, and the speller; SourceError lists all problems.

    objects: what lies among the tensors and is none of the model's, with the module that it is the state of.
    """
    made = speller(dialect, config, dims)
    made.note_objects(objects or {})
    tensors = made.spell(made.take(specs))
    if made.problems:
        counted = f"{len(made.problems)} problem{'s' if len(made.problems) > 1 else ''}"
        raise SourceError("\n  ".join([f"{where} is no {made.architecture} of this config: {counted}", *made.told()]))
    return tensors, made


def held_roles(entries: Iterable[Entry], layers: int) -> dict[int | None, frozenset[str]]:
    """The roles of each layer, and of the model (None)."""
    found: dict[int | None, set[str]] = {layer: set() for layer in (None, *range(layers))}
    for entry in entries:
        every = (None,) if "l" not in entry.row.index else range(layers) if entry.layers is None else entry.layers
        for layer in every:
            found[layer].update(entry.roles)
    return {layer: frozenset(roles) for layer, roles in found.items()}


def _numbered(name: str, layer: int | None, expert: int | None) -> str:
    """A row's name with the numbers of its indices."""
    if layer is not None:
        name = name.replace("{l}", str(layer))
    return name if expert is None else name.replace("{e}", str(expert))


def row_pattern(name: str) -> re.Pattern[str]:
    """A row's name as a pattern; the layer may be left out, where a leading axis stands for it."""
    parts = [f"(?P<{part}>{_DIGITS})" if at % 2 else re.escape(part) for at, part in enumerate(_INDEX.split(name))]
    return re.compile("".join(parts).replace(rf"(?P<l>{_DIGITS})\.", rf"(?:(?P<l>{_DIGITS})\.)?"))


def ignored_pattern(name: str) -> re.Pattern[str]:
    """A name under [ignore] as a pattern: `mtp.*` is all that lies below `mtp`."""
    stem = name.removesuffix(".*")
    return row_pattern(name) if stem == name else re.compile(row_pattern(stem).pattern + r"\..+")


def _pads(expr: Expr) -> bool:
    return isinstance(expr, Call) and (expr.op == "pad" or any(_pads(arg) for arg in expr.args))
