"""The steps of a distributed checkpoint: a dialect's rows over a Hugging Face one, layers apart or stacked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from bridge.dcp.index import slab_name, slab_of
from bridge.dtypes import DTYPES, FLOATS
from bridge.planning import Draft, Drafted, Output, Step
from bridge.sources.foreign_config.families import departures
from bridge.sources.stored_tensor import STORAGE
from bridge.tables.dialect import Dialect, DialectRow
from bridge.tables.match import Matched
from bridge.tables.ops import Rank
from bridge.tables.rectangles import Block, Blocks, Refusal, height
from bridge.tables.slices import Roles, held, lay_out, locate
from bridge.values import TensorSpec

FILE = "__0_0.distcp"
BIAS = "moe.router.choice_bias"  # sums of tiny steps: float32 in every program, whatever the weights are
ROUTER = "moe.router.weight"

Placed = tuple[DialectRow, int | None]
Spelling = Callable[[DialectRow], DialectRow]  # the row that is written in the place of one


def as_written(row: DialectRow) -> DialectRow:
    """The row itself."""
    return row


def spelled_also(dialect: Dialect, *words: str) -> Spelling:
    """Rows as [also] ("") and [for.<word>.also] spell them, where they do."""
    others = [row for row in dialect.rows if not row.written and row.only in words]
    return lambda row: next((other for other in others if other.roles == row.roles), row)


@dataclass
class Drafting:
    """One checkpoint. `names`: the dialect's own numbers. `stacks`: layers that are alike are one tensor.

    `biased`: every router has a bias of its choice there; it is zero where the model has none.
    """

    draft: Draft
    dialect: Dialect
    matched: Matched
    names: Mapping[str, int] = field(default_factory=dict)
    stacks: bool = False
    spelling: Spelling = as_written
    biased: bool = False

    def __post_init__(self) -> None:
        found = locate(self.matched)
        routed = {at: blocks for (role, at, _), blocks in found.items() if role == ROUTER} if self.biased else {}
        zeros = {(BIAS, at, None): (Block("", (0, height(blocks))),) for at, blocks in routed.items()}
        self._roles: Roles = zeros | found
        self._numbers = {**self.matched.names, **self.names}
        self._layers = int(str(self.matched.names["layers"]))
        self._drafted = Drafted()

    def drafted(self) -> Drafted:
        """Make the steps; problems name the row."""
        rows = self._rows()
        stacked = self.stacks and alike(rows, self._layers)
        for row, layer in rows:
            self._place(row, layer, stacked)
        self._unsaid({role for row, _ in rows for role in row.roles})
        said = departures(self.draft.config, self.matched.table, self.matched.architecture)
        self._drafted.problems += [("", text) for text in said]
        if stacked:
            self._drafted.problems += _unlike(self._drafted.steps)
        return self._drafted

    def _rows(self) -> list[Placed]:
        """The rows of the model in the order of its layers."""
        here, word = held(self._roles), self.dialect.architectures[self.matched.architecture]
        tied = self.dialect.shares_head(self.matched)
        found: list[Placed] = [(row, None) for row in self.dialect.rows_of("first", here[None], word)]
        for layer in range(self._layers):
            found += [(row, layer) for row in self.dialect.rows_of("layer", here.get(layer, frozenset()), word)]
        last = self.dialect.rows_of("last", here[None], word)
        found += [(row, None) for row in last if not (tied and row.roles == ("head.weight",))]
        return [(self.spelling(row), layer) for row, layer in found]

    def _place(self, row: DialectRow, layer: int | None, stacked: bool) -> None:
        name = row.name.replace("{l}", str(layer))
        try:
            blocks = lay_out(row.expr, self._roles, (layer, None), self._numbers, Rank())
            slices = tuple(block.slice(self.draft.specs.get(block.source)) for block in blocks)
        except Refusal as refusal:
            self._problem(name, row, layer, str(refusal))
            return
        dtypes = sorted({self.draft.specs[block.source].dtype for block in blocks if block.source})
        if len(dtypes) > 1:
            self._problem(
                name, row, layer, f"is one tensor here, but its parts are {' and '.join(dtypes)}; save them alike"
            )
            return
        held = dtypes[0] if dtypes else "float32"
        dtype = self._dtype(row, held)
        if dtype not in STORAGE or (held != dtype and held not in FLOATS):
            self._problem(
                name, row, layer, f"is {held} in the source, in which no weights are trained; save it as bf16"
            )
            return
        shape = self._shape(row, blocks)
        if stacked and layer is not None:
            name, shape = slab_name(row.name, layer, self._layers), (1, *shape)
        output = Output(TensorSpec(name, shape, dtype), "weight", str(row.expr), FILE)
        shifts = {block.shift for block in blocks if block.source} or {0}
        assert len(shifts) == 1, "norms are not joined"
        self._drafted.steps.append(Step(slices, (output,), shift=shifts.pop()))

    def _dtype(self, row: DialectRow, held: str) -> str:
        """What is written of a tensor that is `held` so."""
        if BIAS in row.roles:
            return "float32"
        return self.draft.options.dtype or held if DTYPES[held].floating else held

    def _shape(self, row: DialectRow, blocks: Blocks) -> tuple[int, ...]:
        rows, rest = height(blocks), blocks[0].shape[1:]
        experts = int(str(self.matched.names["experts"])) if row.stacks else 0
        return (experts, rows // experts, *rest) if experts else (rows, *rest)

    def _unsaid(self, said: Collection[str]) -> None:
        """Name what the model has and the dialect has no words for; `said`: roles that rows of this layout hold."""
        for (role, _, _), blocks in self._roles.items():
            if role in self.dialect.absent and role not in said:
                for block in blocks:
                    self._drafted.dropped[block.source] = self.dialect.absent[role]
                    self._drafted.problems.append((block.source, self.dialect.absent[role]))

    def _problem(self, name: str, row: DialectRow, layer: int | None, text: str) -> None:
        """Note what is wrong with a row; its tensors are not missed besides."""
        for (role, at, _), blocks in self._roles.items():
            if at == layer and role in row.roles:
                self._drafted.dropped |= {block.source: text for block in blocks}
        self._drafted.problems.append((name, text))


def alike(rows: Iterable[Placed], layers: int) -> bool:
    """True where every layer has the same rows."""
    names: dict[int, list[str]] = {}
    for row, layer in rows:
        if layer is not None:
            names.setdefault(layer, []).append(row.name)
    return len(names) == layers and all(found == names[0] for found in names.values())


def _unlike(steps: Iterable[Step]) -> list[tuple[str, str]]:
    """Layers that are one tensor and differ in dtype."""
    found: dict[str, set[str]] = {}
    for step in steps:
        spec = step.outputs[0].spec
        found.setdefault(slab_of(spec.name).whole, set()).add(spec.dtype)
    return [
        (name, f"is one tensor here, but its layers are {' and '.join(sorted(dtypes))}; give dtype=")
        for name, dtypes in found.items()
        if len(dtypes) > 1
    ]
