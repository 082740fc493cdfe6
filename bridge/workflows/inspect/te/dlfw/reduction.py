"""Add up the sums of a step over processes.

Their layers become known by their calls.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.workflows.inspect.collect import Schemes, Sums
from bridge.workflows.inspect.ranks import Ranks, ranks_of
from bridge.workflows.inspect.statistics.losses import LossSums

OTHERWISE = "is quantized otherwise in another process, so that each has its own statistics"


@dataclass(frozen=True)
class Over:
    """The processes over which a tensor's sums are added up; None takes all. `shards`: each has a part of a matrix."""

    group: Any
    shards: bool = False


def over(tensor: str, words: Mapping[str, Any], group: Any) -> Over | None:
    """What a call of Transformer Engine means, as its `get_reduction_params`; None leaves the tensor alone.

    group: that of `set_tensor_reduction_group`, which the call's `reduction_group` wins over.
    """
    if words.get("skip_reduction"):
        return None
    if tensor == "weight":
        split = words.get("tp_group") is not None and (words.get("tp_size") or 1) > 1
        return Over(words["tp_group"], shards=True) if split and _reduces_weights() else None
    own = words.get("reduction_group")
    return Over(group if own is None else own)


def added_up(seen: Mapping[Any, tuple[Sums, Over | None]], group: Any, schemes: Schemes) -> dict[Any, Sums]:
    """The sums of all processes, also of layers that only others have.

    All processes of `group` call it, whatever they saw; of another group, those that saw a tensor of it.
    """
    found = {key: sums for key, (sums, _) in seen.items()}
    for each in dict.fromkeys([Over(group), *(its for _, its in seen.values() if its)]):
        if ranks := ranks_of(each.group):
            mine = {key: sums for key, (sums, its) in seen.items() if its == each}
            for key, sums in _with_others(ranks, mine, each.shards, schemes).items():
                found.setdefault(key, sums)
    return found


def _with_others(ranks: Ranks, mine: Mapping[Any, Sums], shards: bool, schemes: Schemes) -> dict[Any, Sums]:
    """The sums that any process has, each that of all."""
    told = ranks.objects([(key, s.layer, s.tensor, s.plain, s.quantized) for key, s in mine.items()])
    every: dict[Any, list[Any]] = {}
    for key, *about in (row for part in told for row in part):
        every.setdefault(key, []).append(about)
    found: dict[Any, Sums] = {}
    for key, abouts in every.items():
        layer, tensor, plain, quantized = abouts[0]
        if len({len({under for _, under in about[3]}) for about in abouts}) > 1:
            schemes.note(f"{tensor} {OTHERWISE}", layer)
            continue
        if key not in mine:
            found[key] = Sums(layer, tensor, plain, schemes)
            found[key].quantized = quantized
            found[key].lost = {under: LossSums() for _, under in quantized}
        else:
            found[key] = mine[key]
    if found:
        ranks.add_up(found, shards)
    return found


def _reduces_weights() -> bool:
    """Transformer Engine's `set_weight_tensor_tp_group_reduce`."""
    state: Any = sys.modules.get("transformer_engine.debug.pytorch.debug_state")
    return state is None or bool(state.TEDebugState.weight_tensor_tp_group_reduce)
