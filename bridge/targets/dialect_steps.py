"""Steps of a checkpoint whose tensors are rows of a dialect's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bridge.core.errors import PlanError
from bridge.core.text import pattern
from bridge.core.values import Format, Site, Slice
from bridge.planning.drafts import check_choice, drafts_among
from bridge.planning.target import Draft, Drafted
from bridge.quant.schemes.scheme import Scheme
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.meaning import malformed_rope, not_followed, not_known
from bridge.tables.architectures.structure import match_table
from bridge.tables.dialects.dialect import Dialect, DialectRow
from bridge.tables.dialects.layout import Roles, lay_out, locate, roles_by_layer
from bridge.tables.expressions.grammar import Call
from bridge.tables.expressions.ops import Rank
from bridge.tables.expressions.regions import Blocks, Refusal, height
from bridge.tables.expressions.shapes import counts_of

ANY_CLASS = "targets hf and trt need no layout"  # what to do where a dialect has none for a class


@dataclass(frozen=True)
class WrittenDrafts:
    """Draft layers among the layers of a match, from number `first` on, which is how many others there are.

    `own`: tensors that only they have -> their names here. `shared`: theirs -> the model's, which is written for both.
    """

    first: int
    count: int = 0
    own: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)


NO_DRAFTS = WrittenDrafts(1 << 31)


def chosen_drafts(choice: str | None, scheme: Scheme | None, why_not: str) -> str | None:
    """The option `drafts` of a target: they are kept unless it has no place for them, for the reason `why_not`."""
    if choice:
        check_choice(choice, scheme)
    if choice in ("keep", "quantize") and why_not:
        raise PlanError(f"{why_not}; use drafts='drop' (--drafts drop)")
    return choice or (None if why_not else "keep")


def with_drafts(draft: Draft, dialect: Dialect, matched: Matched) -> tuple[Matched, WrittenDrafts]:
    """The match that has written draft layers among its layers, and these."""
    first = int(str(matched.names["layers"]))
    rows = {row.within: name for name, row in dialect.draft_rows(matched.architecture).items()}
    written = drafts_among((name for name in draft.specs if name not in draft.structure.ignored), draft.config)
    if not written:
        return matched, WrittenDrafts(first)
    before = first if dialect.draft_layers else 0
    named = {name: (rows[within], layer - before) for name, (layer, within) in written.items() if within in rows}
    own = {name: at.format(l=layer) for name, (at, layer) in named.items() if "{l}" in at}
    by_row = {row.name: row.roles for row in dialect.rows}
    of_role = {entry.roles: name for name, (entry, layer, _) in matched.placed.items() if layer is None}
    tied = next(iter(matched.tied.values()), "")
    shared = {name: of_role.get(by_row[at], tied) for name, (at, _) in named.items() if "{l}" not in at}
    count = max(layer for layer, _ in written.values()) + 1
    rest = {name: spec for name, spec in draft.specs.items() if name not in named}
    whole = match_table({**draft.config, "num_hidden_layers": count}, rest)
    return whole, WrittenDrafts(first, count - first, own, shared)


@dataclass(frozen=True)
class Placed:
    """A row's tensor of one layer (None: of the model): rectangles of source tensors, and how to read them."""

    row: DialectRow
    layer: int | None
    name: str
    blocks: Blocks
    slices: tuple[Slice, ...]

    @property
    def shift(self) -> int:
        shifts = {block.shift for block in self.blocks if block.source} or {0}
        assert len(shifts) == 1, "norms are not joined"
        return shifts.pop()


@dataclass
class DialectDrafting:
    """Base class: rows of the model, their rectangles of source tensors, and problems that name the row."""

    draft: Draft
    dialect: Dialect
    matched: Matched
    drafts: WrittenDrafts = NO_DRAFTS

    def __post_init__(self) -> None:
        self._roles: Roles = locate(self.matched)
        self._sites = {site.module: site for site in self.draft.structure.sites}
        self._quantized = self.draft.quantized
        self._layers = int(str(self.matched.names["layers"]))
        matched, architecture = self.matched, self.matched.architecture
        unlike = not_followed(matched.table, architecture, matched.config, self.dialect.followed(architecture))
        wrong = [*malformed_rope(matched.config), *unlike]
        note = not_known(matched.table, architecture, matched.config)
        self._drafted = Drafted(
            copies=dict(self.drafts.shared),
            problems=[("config.json", text) for text in wrong],
            notes=[note] * bool(note),
        )

    def _rows(self, head: bool) -> Iterator[tuple[DialectRow, int | None]]:
        """Yield every row with its layer; without `head` the output head is left out."""
        present, layout_name = roles_by_layer(self._roles), self.dialect.architectures[self.matched.architecture]
        for row in self.dialect.rows_of("first", present[None], layout_name):
            yield row, None
        for layer in range(self._layers):
            for row in self.dialect.rows_of("layer", present.get(layer, frozenset()), layout_name):
                yield row, layer
        for row in self.dialect.rows_of("last", present[None], layout_name):
            if head or row.roles != ("head.weight",):
                yield row, None

    def _place(self, row: DialectRow, layer: int | None, names: Mapping[str, object], rank: Rank) -> Placed | None:
        """Lay out a row's tensor for one rank; None if there is a problem."""
        try:
            blocks = lay_out(row.expr, self._roles, (layer, None), names, rank)
            stored = ((block, self.draft.specs.get(block.source)) for block in blocks)
            slices = tuple(part.slice(spec) for block, spec in stored for part in block.apart(spec))
        except Refusal as refusal:
            self._problem(row, layer, str(refusal))
            return None
        dtypes = sorted({self.draft.specs[block.source].dtype for block in blocks if block.source})
        if len(dtypes) > 1:
            why = f"is one tensor here, but its parts are {' and '.join(dtypes)}; save them in one dtype"
            self._problem(row, layer, why)
            return None
        return Placed(row, layer, self._named(row, layer), blocks, slices)

    def _sites_of(self, placed: Placed) -> tuple[list[Site], Format | None] | None:
        """The sites that a tensor is of, and their format if they are quantized; None if they have several formats."""
        modules = dict.fromkeys(block.module for block in placed.blocks if block.module)
        sites = [self._sites[module] for module in modules if module in self._sites]
        formats = {self.draft.formats.get(site.weight) for site in sites}
        quantized = next((format_ for format_ in formats if isinstance(format_, Format)), None)
        if quantized and len(formats) > 1:
            joined = ", ".join(dict.fromkeys(map(pattern, modules)))  # without numbers, so that layers fold
            why = f"{joined} are one matrix here and need one format; name all in one rule"
            self._problem(placed.row, placed.layer, why)
            return None
        return sites, quantized

    def _refuse_quantized_head(self, why: str) -> None:
        """Note a problem if the head, which is the embedding in this output, has a format."""
        head = self._roles.get(("head.weight", None, None), ())
        if head and head[0].module in self._quantized:
            self._drafted.problems.append((head[0].module, why))

    def _named(self, row: DialectRow, layer: int | None) -> str:
        return self.dialect.as_draft(row.name.replace("{l}", str(layer)), self.drafts.first)

    def _experts(self, row: DialectRow) -> int:
        """Number of matrices in a stack, 0 if the row is not a stack."""
        return int(str(self.matched.names["experts"])) if row.stacks else 0

    def _shape(self, placed: Placed) -> tuple[int, ...]:
        rows, rest, first = height(placed.blocks), placed.blocks[0].shape[1:], self._first_axis(placed.row)
        return (first, rows // first, *rest) if first else (rows, *rest)

    def _first_axis(self, row: DialectRow) -> int:
        """The extent of an axis before the rows, of experts or heads; 0 without one."""
        if isinstance(row.expr, Call) and row.expr.op in ("stack", "unflatten", "transpose_heads"):
            (extent,) = counts_of(row.expr, self.matched.names).values()
            return extent
        return 0

    def _problem(self, row: DialectRow, layer: int | None, text: str) -> None:
        """Note a problem of a row, once for all ranks; its tensors are dropped, so they are not also missing."""
        for (role, role_layer, _), blocks in self._roles.items():
            if role_layer == layer and role in row.roles:
                self._drafted.dropped |= {block.source: text for block in blocks}
        problem = (self._named(row, layer), text)
        if problem not in self._drafted.problems:
            self._drafted.problems.append(problem)
