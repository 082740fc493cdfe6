"""The steps of a distributed checkpoint: a dialect's rows over a Hugging Face one, layers apart or stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bridge.dcp.index import slab_name, slab_of
from bridge.dtypes import DTYPES
from bridge.planning import Draft, Drafted, Output, Step
from bridge.tables.dialect import Dialect, DialectRow
from bridge.tables.layouts import Rank
from bridge.tables.match import Matched
from bridge.tables.ops import Refusal
from bridge.tables.rectangles import Blocks, height
from bridge.tables.slices import Roles, lay_out, locate
from bridge.trtllm.ranks import held, shares_head
from bridge.values import Slice, TensorSpec

FILE = "__0_0.distcp"
OWN_DTYPE = "moe.router.choice_bias"  # sums of tiny steps: float32 in every program, whatever the weights are

Placed = tuple[DialectRow, int | None]


def as_written(row: DialectRow) -> DialectRow:
    """The row itself."""
    return row


@dataclass
class Drafting:
    """One checkpoint. `names`: the dialect's own numbers. `stacks`: layers that are alike are one tensor.

    `spelling`: the row that is written in the place of one.
    """

    draft: Draft
    dialect: Dialect
    matched: Matched
    names: Mapping[str, int] = field(default_factory=dict)
    stacks: bool = False
    spelling: Callable[[DialectRow], DialectRow] = as_written

    def __post_init__(self) -> None:
        self._roles: Roles = locate(self.matched)
        self._numbers = {**self.matched.names, **self.names}
        self._layers = int(str(self.matched.names["layers"]))
        self._drafted = Drafted()

    def drafted(self) -> Drafted:
        """Make the steps; problems name the row."""
        rows = self._rows()
        stacked = self.stacks and alike(rows, self._layers)
        for row, layer in rows:
            self._place(row, layer, stacked)
        self._unsaid()
        if stacked:
            self._drafted.problems += _unlike(self._drafted.steps)
        return self._drafted

    def _rows(self) -> list[Placed]:
        """The rows of the model in the order of its layers."""
        here, word = held(self._roles), self.dialect.architectures[self.matched.architecture]
        tied = shares_head(self.dialect, self.matched, 1)
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
        except Refusal as refusal:
            self._problem(name, row, layer, str(refusal))
            return
        dtypes = sorted({self.draft.specs[block.source].dtype for block in blocks if block.source})
        if len(dtypes) > 1:
            self._problem(
                name, row, layer, f"is one tensor here, but its parts are {' and '.join(dtypes)}; save them alike"
            )
            return
        shape, dtype = self._shape(row, blocks), dtypes[0]
        if self.draft.options.dtype and DTYPES[dtype].floating and OWN_DTYPE not in row.roles:
            dtype = self.draft.options.dtype
        if stacked and layer is not None:
            name, shape = slab_name(row.name, layer, self._layers), (1, *shape)
        output = Output(TensorSpec(name, shape, dtype), "weight", str(row.expr), FILE)
        shifts = {block.shift for block in blocks if block.source}
        assert len(shifts) == 1, "norms are not joined"
        self._drafted.steps.append(Step(self._slices(blocks), (output,), shift=shifts.pop()))

    def _shape(self, row: DialectRow, blocks: Blocks) -> tuple[int, ...]:
        rows, rest = height(blocks), blocks[0].shape[1:]
        experts = int(str(self.matched.names["experts"])) if row.stacks else 0
        return (experts, rows // experts, *rest) if experts else (rows, *rest)

    def _slices(self, blocks: Blocks) -> tuple[Slice, ...]:
        return tuple(block.slice(self.draft.specs.get(block.source)) for block in blocks)

    def _unsaid(self) -> None:
        """Name what the model has and the dialect has no words for."""
        for (role, _, _), blocks in self._roles.items():
            if role in self.dialect.absent:
                for block in blocks:
                    self._drafted.dropped[block.source] = self.dialect.absent[role]
                    self._drafted.problems.append(f"{block.source}: {self.dialect.absent[role]}")

    def _problem(self, name: str, row: DialectRow, layer: int | None, text: str) -> None:
        """Note what is wrong with a row; its tensors are not missed besides."""
        for (role, at, _), blocks in self._roles.items():
            if at == layer and role in row.roles:
                self._drafted.dropped |= {block.source: text for block in blocks}
        self._drafted.problems.append(f"{name}: {text}")


def alike(rows: Iterable[Placed], layers: int) -> bool:
    """True where every layer has the same rows."""
    names: dict[int, list[str]] = {}
    for row, layer in rows:
        if layer is not None:
            names.setdefault(layer, []).append(row.name)
    return len(names) == layers and all(found == names[0] for found in names.values())


def _unlike(steps: Iterable[Step]) -> list[str]:
    """Layers that are one tensor and differ in dtype."""
    found: dict[str, set[str]] = {}
    for step in steps:
        spec = step.outputs[0].spec
        found.setdefault(slab_of(spec.name).whole, set()).add(spec.dtype)
    return [
        f"{name}: is one tensor here, but its layers are {' and '.join(sorted(dtypes))}; give dtype="
        for name, dtypes in found.items()
        if len(dtypes) > 1
    ]
