"""Configs with one entry changed: every field that computes or that rows depend on, and rotary entries."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.tables.architectures.arch import ArchTable, load_arch
from bridge.tables.architectures.meaning import FULL, PARTIAL, SLIDING, shared
from bridge.tables.expressions.grammar import roles_in

LARGE = 0.3  # what norms add to a variance
THETA = {"rope_type": "default", "rope_theta": 123.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 123.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"factor": 4.0, "rope_theta": 123.0, "original_max_position_embeddings": 16}
# In place of all rotary entries; those of transformers 4 have no rope_parameters.
ROTARY: dict[str, dict[str, Any]] = {
    "theta": {"rope_parameters": THETA},
    "theta-old": {"rope_theta": 123.0},
    "linear": {"rope_parameters": LINEAR},
    "linear-old": {"rope_theta": 123.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_parameters": LLAMA3 | LONG},
    "yarn": {"rope_parameters": {"rope_type": "yarn"} | LONG},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 123.0}},
    "partial": {"rope_parameters": THETA | {PARTIAL: 0.75}},
    "partial-old": {"rope_theta": 123.0, PARTIAL: 0.75},
    "both": {"rope_parameters": THETA, "rope_scaling": LINEAR | {"rope_theta": 77.0}},
}
VALUES: dict[str, Any] = {
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "mlp_only_layers": [1], "moe_layers": [2],
    "no_rope_layers": [1, 0, 1],
}  # fmt: skip
# What a field needs to have an effect; None removes what transformers wrote.
NEEDS: dict[str, dict[str, Any]] = {
    "use_sliding_window": {"sliding_window": 8, "layer_types": None},
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 8, "layer_types": None},
    "topk_group": {"n_group": 4},
    "layer_types": {"use_sliding_window": True, "sliding_window": 8},
}


def switches(table: ArchTable) -> frozenset[str]:
    """Fields that rows depend on and that are no extents."""
    return frozenset(table.config).difference(*(formula.names for formula in table.dims.values()))


@functools.cache
def changes(architecture: str) -> tuple[str, ...]:
    """Fields, and names of `ROTARY` after `rope:`."""
    table = table_of(architecture)
    fields = {*shared().section("computes"), *table.computes, *switches(table)}
    learned = any(row.expr and "embed.positions.weight" in roles_in(row.expr) for row in table.rows)
    return (*sorted(fields), *(f"rope:{name}" for name in ROTARY if not learned))


def table_of(architecture: str) -> ArchTable:
    found = load_arch(architecture)
    assert found
    return found


def changed(architecture: str, config: Mapping[str, Any], change: str) -> dict[str, Any]:
    """Entries that replace those of a config.json that transformers wrote; None removes one."""
    if change.startswith("rope:"):
        given = ROTARY[change.removeprefix("rope:")]
        if FULL in (config.get("rope_parameters") or {}) and "rope_parameters" in given:
            local = {"rope_type": "default", "rope_theta": 1e4}
            given = given | {"rope_parameters": {SLIDING: local, FULL: given["rope_parameters"]}}
        return {"rope_parameters": None, **given}
    value = config.get(change, table_of(architecture).computes.get(change))
    needs = {name: given for name, given in NEEDS.get(change, {}).items() if name in config}
    return needs | {change: _another(change, value, config)}


def _another(name: str, value: Any, config: Mapping[str, Any]) -> Any:
    """Another value: the other bool, another activation or number, 8 for none."""
    if name in VALUES:
        return VALUES[name]
    if name == "layer_types":
        windowed = "chunked_attention" if "attention_chunk_size" in config else SLIDING
        return [windowed if layer % 2 else FULL for layer in range(config["num_hidden_layers"])]
    if isinstance(value, bool) or name.startswith("use_"):
        return not value
    if isinstance(value, str):
        return "relu" if value == "silu" else "silu"
    if name.endswith(("eps", "epsilon")):
        return LARGE
    if isinstance(value, int):
        return value - 1 if value > 1 else value + 1
    return 8 if value is None else value * 1.5


def rewrite(directory: Path, entries: Mapping[str, Any]) -> None:
    """Replace entries of its config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | dict(entries)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None or entries.get(k, 0) is not None}))
