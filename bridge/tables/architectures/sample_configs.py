"""Configs to try a table with: all that its conditions tell apart, in a model of few layers. Never reads a model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from bridge.tables.arch import ArchTable

LAYERS = 3  # enough to tell the first, a middle and the last layer apart
# Differ pairwise, and so do the products and sums of them that are shapes; each can be cut as layouts cut it.
EXTENTS = {
    "hidden": 46, "heads": 6, "kv_heads": 2, "head_dim": 10, "ffn": 74, "moe_ffn": 34, "experts": 5, "vocab": 97,
    "positions": 113, "types": 7, "labels": 11, "q_rank": 26, "kv_rank": 22, "nope_dim": 14, "rope_dim": 8, "v_dim": 13,
    "shared_ffn": 58, "layers": LAYERS,
}  # fmt: skip


def configs(table: ArchTable) -> Iterator[dict[str, object]]:
    """Yield the default config with few layers: every switch on and off, lists of layers empty and not, counts null.

    A count is null where the table asks whether it is there.
    """
    choices: dict[str, tuple[object, ...]] = {}
    asked = {str(row.when) for row in table.rows}
    for field, default in table.config.items():
        if isinstance(default, bool):
            choices[field] = (False, True)
        elif isinstance(default, list):
            choices[field] = ([], [1])
        elif {field, f"not {field}"} & asked:
            choices[field] = (default, None)
    layers = table.dims["layers"].names if "layers" in table.dims else ()
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True)) | {name: LAYERS for name in layers}
