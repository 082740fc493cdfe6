"""ModelOpt 0.47's search for sizes: a grid within a budget, of which the ten largest are scored.

`search_best_arch_by_metrics` runs on a Megatron model with Transformer Engine. Its grid is made by its own code in a
process with stand-ins; that the largest ten are scored and the best is taken is repeated here.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor

from bridge.core.errors import PlanError
from bridge.sources.pruned.opening import Cut
from bridge.workflows.prune.sizes import Sizer, multiple_of
from tests.oracles import megatron_oracle, prune_oracle

TOP_K, WIDTH, DEPTH = 10, 0.4, 0.2  # ModelOpt's defaults
NAMES = {"hidden_size": "hidden", "ffn_hidden_size": "ffn", "num_attention_heads": "heads", "num_layers": "layers"}
Keep = dict[str, int]


def combinations_of(whole: Cut, width: float = WIDTH, depth: float = DEPTH) -> list[Keep]:
    """All sizes of the grid.

    ModelOpt's divisors, 256 of hidden, 512 of ffn and 2 of layers, leave a tiny model no choice: here widths are the
    multiples that bridge has, and layers all numbers. Query heads it leaves out in all groups alike.
    """
    before, groups = whole.before, whole.before.get("kv_heads", whole.before["heads"])
    units = {dim: multiple_of(dim, before[dim]) for dim in ("hidden", "ffn")} | {"layers": 1, "heads": groups}
    space = {name: list(range(units[dim], before[dim] + 1, units[dim])) for name, dim in NAMES.items()}
    with tempfile.TemporaryDirectory() as store:
        start = prune_oracle.start, (f"{store}/store",)
        with ProcessPoolExecutor(1, megatron_oracle.processes(), *start) as pool:
            every = pool.submit(prune_oracle.combinations, space, width, depth).result()
    named = [{NAMES[name]: size for name, size in each.items()} for each in every]
    return [{dim: size for dim, size in each.items() if size != before[dim]} for each in named]


def best_of_grid(
    whole: Cut, combinations: list[Keep], limit: int, cost: Callable[[Mapping[str, int]], float]
) -> tuple[Keep, int] | None:
    """What ModelOpt chooses by parameters and a score, here -`cost`; None if nothing fits the limit and the config."""
    sizer, fitting = Sizer(whole, "parameters", None), []
    for keep in filter(None, combinations):
        with contextlib.suppress(PlanError):
            if (size := sizer.exact(whole.to(keep))) <= limit:
                fitting.append((keep, size))
    top = sorted(fitting, key=lambda one: one[1], reverse=True)[:TOP_K]
    return min(top, key=lambda one: cost(one[0])) if top else None
