"""Find the matrices and norms of a model that score its dims."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.core.errors import PlanError
from bridge.sources.pruned.opening import Cut
from bridge.tables.architectures.match import Entry
from bridge.tables.architectures.structure import layout_of

if TYPE_CHECKING:
    from bridge.sources.live_models.checkpoint_names import LiveSlice, Origin


@dataclass(frozen=True)
class Reader:
    """A matrix whose input has a channel for each of the `parts` of `dim`, or several, as a head has.

    `tensor`, `role`: its stored name and what it is. `part`: the live tensor that it is a part of. `turned`: both are
    [in, out]. `stacked`: both have all experts. `bias`: the parameter with their biases, "" where they have none.
    """

    dim: str
    parts: int
    layer: int
    expert: int | None
    tensor: str
    role: str
    part: LiveSlice
    turned: bool
    stacked: bool
    bias: str = ""

    @property
    def module(self) -> str:
        """The live module that has the weight."""
        return self.part.live.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        return self.part.live.rpartition(".")[2]


@dataclass(frozen=True)
class Norm:
    """A norm before attention or MLP, whose output has a channel for each part of `hidden`."""

    layer: int
    module: str


def readers_of(cut: Cut, origins: Mapping[str, Origin]) -> tuple[Reader, ...]:
    """The matrices whose inputs score the dims of a cut, but for hidden and layers."""
    scored = {"kv_heads": "heads", "experts": "moe_ffn"}  # a group by its heads, an expert where its input is read
    dims = {scored.get(dim, dim) for dim in cut.dims} - {"hidden", "layers"}
    biases = {(*entry.roles, at, e): name for name, (entry, at, e) in cut.matched.placed.items()}
    found: list[Reader] = []
    for tensor, (entry, layer, expert) in cut.matched.placed.items():
        role, dim = _read(cut, entry)
        if dim not in dims:
            continue
        origin = origins.get(tensor)
        if layer is None or origin is None or origin.ref is None:
            raise PlanError(f"{tensor}: the live model has no tensor of this matrix alone, so {dim} has no scores")
        turned, stacked = layout_of(entry.row.expr).endswith("in_out"), entry.row.stacks
        bias = biases.get((role.replace(".weight", ".bias"), layer, expert), "") if stacked else ""
        parameter = origins[bias].parts[0].live.rpartition(".")[2] if bias else ""
        for number in range(cut.before["experts"]) if stacked else (expert,):
            found.append(
                Reader(dim, cut.before[dim], layer, number, tensor, role, origin.ref, turned, stacked, parameter)
            )
    return tuple(found)


def linears_of(cut: Cut, tensors: Collection[str], origins: Mapping[str, Origin]) -> tuple[Reader, ...]:
    """The matrices of some stored tensors, whatever they read."""
    found: list[Reader] = []
    for tensor in tensors:
        entry, layer, expert = cut.matched.placed[tensor]
        origin = origins.get(tensor)
        if layer is None or origin is None or origin.ref is None:
            raise PlanError(
                f"{tensor}: the live model has no tensor of this matrix alone, so that its inputs are not seen; take "
                'sparse_method="magnitude" (--sparse-method)'
            )
        turned, stacked = layout_of(entry.row.expr).endswith("in_out"), entry.row.stacks
        for number in range(cut.before["experts"]) if stacked else (expert,):
            found.append(Reader("", 1, layer, number, tensor, entry.roles[0], origin.ref, turned, stacked))
    return tuple(found)


def _read(cut: Cut, entry: Entry) -> tuple[str, str]:
    """The role of a row's matrix, and the dim that can be cut along its input; "" without one."""
    roles = cut.matched.table.roles
    for role in entry.roles:
        shape = roles.roles[role].shape
        inner = (shape[1].names & roles.prune.keys()) - {"hidden"} if len(shape) == 2 else ()
        if inner and roles.roles[role].kind == "linear":
            return role, next(iter(inner))
    return "", ""


def norms_of(cut: Cut, origins: Mapping[str, Origin]) -> tuple[Norm, ...]:
    """The norms before attention and MLP of every layer."""
    found = []
    for tensor, (entry, layer, _) in cut.matched.placed.items():
        if layer is not None and {"attn.norm.weight", "mlp.norm.weight"} & {*entry.roles}:
            found.append(Norm(layer, origins[tensor].parts[0].live.rpartition(".")[0]))
    return tuple(found)


def layers_of(cut: Cut, origins: Mapping[str, Origin]) -> dict[str, int]:
    """The live modules that are layers, with their numbers."""
    found: dict[str, int] = {}
    for tensor, (_, layer, _) in cut.matched.placed.items():
        if layer is not None and tensor in origins:
            live = origins[tensor].parts[0].live
            if match := re.match(rf"(.*?\.)?{layer}(?=\.)", live):
                found[match[0]] = layer
    return found
