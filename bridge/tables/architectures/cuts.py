"""How ranks that share a layer (tensor parallelism) cut its matrices."""

from __future__ import annotations

from bridge.core.values import Cut
from bridge.tables.architectures.match import Matched, role_shape

# Dims of the inside of attention or of an MLP: ranks compute it apart, and add up what is `hidden` wide again.
SHARED = {
    "heads": "query heads",
    "kv_heads": "KV heads",
    "ffn": "inner values of the MLP",
    "moe_ffn": "inner values of an expert",
    "shared_ffn": "inner values of the shared experts",
}


def cuts_of(matched: Matched) -> dict[str, Cut]:
    """Return the roles of matrices that ranks share, each with the axis that they cut."""
    cuts = {}
    for entry in matched.entries:
        for name in entry.roles if entry.expected else ():
            role = matched.table.roles.roles[name]
            if role.kind != "linear" or name in cuts:
                continue
            extents = role_shape(matched.table, name, matched.names)
            for axis, formula, extent in zip(("out", "in"), role.shape, extents, strict=True):
                for dim in sorted(formula.names & SHARED.keys()):
                    count = int(str(matched.names[dim]))
                    cuts[name] = Cut(axis, SHARED[dim], count, extent // count, dim == "kv_heads")
    return cuts
