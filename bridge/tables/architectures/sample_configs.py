"""Small configs that exercise every condition of a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from bridge.tables.architectures.arch import ArchTable

LAYERS = 3  # a first, a middle and a last layer
# Pairwise different, as are the products and sums of them that are shapes; each can be cut as layouts require.
EXTENTS = {
    "hidden": 46, "heads": 6, "kv_heads": 2, "head_dim": 10, "ffn": 74, "moe_ffn": 34, "experts": 5, "vocab": 97,
    "positions": 113, "types": 7, "labels": 11, "q_rank": 26, "kv_rank": 22, "nope_dim": 14, "rope_dim": 8, "v_dim": 13,
    "index_heads": 9, "index_dim": 18,
    "shared_ffn": 58, "conv_width": 3, "gdn_heads": 4, "gdn_key_heads": 2, "gdn_key_dim": 9, "gdn_value_dim": 12,
    "ssm_heads": 16, "ssm_head_dim": 19, "ssm_groups": 8, "ssm_state": 23, "moe_latent": 38, "layer_vocab": 89,
    "layer_input": 25,
    "streams": 4, "out_groups": 3, "out_rank": 7, "out_width": 20, "sparse_span": 15, "dense_span": 21, "top_k": 17,
    "layers": LAYERS,
}  # fmt: skip


def configs(table: ArchTable) -> Iterator[dict[str, object]]:
    """Yield the default config with few layers: every switch on and off, lists of layers empty and not.

    A count is also null, or the other way around, if a condition of the table tests whether it is present.
    """
    choices: dict[str, tuple[object, ...]] = {}
    conditions = {str(row.when) for row in table.rows}
    tested = {name for row in table.rows if row.when for name in row.when.names}
    counted = {name for dim, formula in table.dims.items() if dim != "layers" for name in formula.names}
    for field, default in table.config.items():
        if isinstance(default, bool):
            choices[field] = (False, True)
        elif isinstance(default, list):
            choices[field] = ([], [1])
        elif {field, f"not {field}"} & conditions:
            choices[field] = (default, None)
        elif default is None and field in tested & counted:
            choices[field] = (None, EXTENTS["hidden"])
    layers = table.dims["layers"].names if "layers" in table.dims else frozenset()
    layers = layers if str(table.dims.get("layers")) in layers else frozenset()  # of a list: as many as its entries
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True)) | {name: LAYERS for name in layers}
