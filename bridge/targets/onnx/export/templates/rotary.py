"""Rotary settings that templates follow, by transformers' rules for each form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bridge.sources.configs.rope import Rope, rope_of
from bridge.tables.architectures.meaning import FULL, SLIDING

SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # kinds of scaling, and the entries that each needs


def read_rope(config: Mapping[str, Any], theta: float, local_theta: bool) -> Rope:
    """Read the settings; ValueError for a form, a kind or a number that is not among those that are followed.

    `theta`: without an entry. `local_theta`: layers with a window have a theta of their own, and no
    scaling.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old:
        raise ValueError("rope_parameters and rope_scaling: which counts depends on the version of transformers")
    if local_theta and new:
        if new.keys() != {FULL, SLIDING} or new[SLIDING].keys() - {"rope_type"} != {"rope_theta"}:
            raise ValueError(f"rope_parameters {new}")
        older = config.keys() & {"rope_theta", "rope_local_base_freq"}
        if older or new[SLIDING].get("rope_type", "default") != "default":
            raise ValueError(f"rope_parameters {new}, {older}")
        _check(new[FULL], ("rope_type",))
    else:
        _check(new or old, ("rope_type",) if local_theta else ("rope_type", "type"))
    rope = rope_of(config, theta)
    places = (config, *((new[FULL], new[SLIDING]) if local_theta and new else (new, old)))
    thetas = [place[name] for place in places for name in ("rope_theta", "rope_local_base_freq") if name in place]
    for number in thetas:
        _check_number("rope_theta", number)
    if local_theta and rope.local == rope.theta and rope.kind == "default":
        raise ValueError("layers of both kinds have the same frequencies, which an export computes once")
    return rope


def _check(scaling: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """ValueError unless a kind of scaling has its entries, and no others; `names`: of the kind."""
    kinds = [scaling[name] for name in names if name in scaling] or ["default"]
    needed = SCALINGS[kinds[0]]
    if len(kinds) > 1 or scaling.keys() - {*names, "rope_theta"} != {*needed}:
        raise ValueError(f"rotary scaling {dict(scaling)}")
    for name in needed:
        _check_number(name, scaling[name], whole=name.startswith("original"))
    if needed[1:] and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError(f"low_freq_factor {scaling['low_freq_factor']} is not below high_freq_factor")


def _check_number(name: str, value: Any, whole: bool = False) -> None:
    if type(value) not in ((int,) if whole else (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} {value!r}")
