"""Steps of a distributed checkpoint, with layers apart or stacked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from bridge.core.dtypes import DTYPES, FLOATS
from bridge.core.formats.dcp_index import slab_name, slab_of
from bridge.core.formats.torch_pickle import STORAGE
from bridge.core.values import Slice, TensorSpec
from bridge.planning.plan import Output, Step
from bridge.planning.target import Drafted
from bridge.sources.configs.families import deviations
from bridge.tables.dialects.dialect import DialectRow
from bridge.tables.dialects.layout import Roles
from bridge.tables.expressions.ops import Rank
from bridge.tables.expressions.regions import Block, height
from bridge.targets.dialect_steps import DialectDrafting

FILE = "__0_0.distcp"
BIAS = "moe.router.choice_bias"  # sums of tiny steps: float32 in every program, whatever dtype the weights have
ROUTER = "moe.router.weight"


@dataclass
class Drafting(DialectDrafting):
    """Steps of one checkpoint. `names`: numbers of the dialect. `stacks`: equal layers become one tensor.

    `also`: words whose rows of [for.<word>.also], for "" of [also], are written instead of those with the same roles.
    `biased`: every router gets a bias for its choice, which is zero if the model has none.
    """

    names: Mapping[str, int] = field(default_factory=dict)
    stacks: bool = False
    also: tuple[str, ...] = ()
    biased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.biased:
            routed = {layer: blocks for (role, layer, _), blocks in self._roles.items() if role == ROUTER}
            zeros: Roles = {(BIAS, layer, None): (Block("", (0, height(blocks))),) for layer, blocks in routed.items()}
            self._roles = {**zeros, **self._roles}

    def drafted(self) -> Drafted:
        """Make the steps; problems name the row."""
        tied = self.dialect.shares_head(self.matched)
        others = reversed(self.dialect.rows)  # of two with the same roles, the first is written
        instead = {row.roles: row for row in others if not row.written and row.only in self.also}
        rows = [(instead.get(row.roles, row), layer) for row, layer in self._rows(head=not tied)]
        first = self.drafts.first
        stacked = self.stacks and are_uniform([at for at in rows if at[1] is None or at[1] < first], first)
        for row, layer in rows:
            self._add(row, layer, stacked and layer is not None and layer < first)
        for source, name in self.drafts.own.items():
            self._add_own(source, name)
        self._refuse_absent({role for row, _ in rows for role in row.roles})
        texts = deviations(self.draft.config, self.matched.table, self.matched.architecture)
        self._drafted.problems += [("", text) for text in texts]
        if stacked:
            self._drafted.problems += _mixed_dtypes(self._drafted.steps)
        return self._drafted

    def _add(self, row: DialectRow, layer: int | None, stacked: bool) -> None:
        placed = self._place(row, layer, {**self.matched.names, **self.names}, Rank())
        if placed is None:
            return
        sources = (self.draft.specs[block.source] for block in placed.blocks if block.source)
        source_dtype = next((spec.dtype for spec in sources), "float32")
        dtype = self._dtype(row.roles, source_dtype)
        if why := _unstorable(source_dtype, dtype):
            self._problem(row, layer, why)
            return
        name, shape = placed.name, self._shape(placed)
        if stacked and layer is not None:
            name, shape = slab_name(row.name, layer, self.drafts.first), (1, *shape)
        output = Output(TensorSpec(name, shape, dtype), "weight", str(row.expr), FILE)
        self._drafted.steps.append(Step(placed.slices, (output,), shift=placed.shift))

    def _add_own(self, source: str, name: str) -> None:
        """Add a tensor that only draft layers have."""
        spec = self.draft.specs[source]
        dtype = self._dtype((), spec.dtype)
        if why := _unstorable(spec.dtype, dtype):
            self._drafted.problems.append((name, why))
            self._drafted.dropped[source] = why
            return
        output = Output(TensorSpec(name, spec.shape, dtype), "weight", source, FILE)
        self._drafted.steps.append(Step((Slice(source),), (output,)))

    def _dtype(self, roles: tuple[str, ...], source_dtype: str) -> str:
        if BIAS in roles:
            return "float32"
        return self.draft.options.dtype or source_dtype if DTYPES[source_dtype].floating else source_dtype

    def _refuse_absent(self, written: Collection[str]) -> None:
        """Report roles that the model has and the dialect has not; `written`: roles in the rows of this layout."""
        for (role, _, _), blocks in self._roles.items():
            if role in self.dialect.absent and role not in written:
                for block in blocks:
                    self._drafted.dropped[block.source] = self.dialect.absent[role]
                    self._drafted.problems.append((block.source, self.dialect.absent[role]))


def _unstorable(source: str, dtype: str) -> str:
    """Why a tensor of dtype `source` is not written as `dtype`; "" if it is."""
    if dtype in STORAGE and (source == dtype or source in FLOATS):
        return ""
    return f"is {source} in the source, which is not a training dtype; save it as bf16"


def are_uniform(rows: Iterable[tuple[DialectRow, int | None]], layers: int) -> bool:
    """True if every layer has the same rows."""
    names: dict[int, list[str]] = {}
    for row, layer in rows:
        if layer is not None:
            names.setdefault(layer, []).append(row.name)
    return len(names) == layers and all(layer_names == names[0] for layer_names in names.values())


def _mixed_dtypes(steps: Iterable[Step]) -> list[tuple[str, str]]:
    """Problems of layers that are one tensor but differ in dtype."""
    layer_dtypes: dict[str, set[str]] = {}
    for step in steps:
        spec = step.outputs[0].spec
        layer_dtypes.setdefault(slab_of(spec.name).whole, set()).add(spec.dtype)
    mixed = {name: " and ".join(sorted(dtypes)) for name, dtypes in layer_dtypes.items() if len(dtypes) > 1}
    return [(name, f"is one tensor here, but its layers are {dtypes}; give dtype=") for name, dtypes in mixed.items()]
