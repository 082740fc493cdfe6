"""Rotary embeddings in the form of transformers 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.core.arrays import np
from bridge.core.errors import SourceError
from bridge.sources.configs.facts import Fact, Facts, Given, is_scaling, shown
from bridge.tables.architectures.meaning import FULL, SLIDING


def take_rope(terms: dict[str, Fact], entries: Given) -> bool:
    """Replace the terms by the caller's rotary fields; return whether these tell the scaling.

    Older fields are removed from `entries`: transformers ignores them next to `rope_parameters`.
    """
    if "rope_parameters" in entries:
        _check(entries["rope_parameters"], entries.where("rope_parameters"))
        for term in ("theta", "scaling", "partial"):
            terms.pop(term, None)
        return True
    if "partial_rotary_factor" in entries:
        terms["partial"] = Fact(entries.pop("partial_rotary_factor"), entries.where("partial_rotary_factor"))
    has_scaling = "rope_scaling" in entries
    if has_scaling:
        given = entries.pop("rope_scaling")
        if not isinstance(given, Mapping | None):
            raise SourceError(f"{entries.where('rope_scaling')} = {shown(given)}: must be a mapping or null")
        terms.pop("scaling", None)
        if given:
            kind = {"rope_type": given["type"]} if "type" in given else {}
            own = {name: value for name, value in given.items() if name != "type"}
            terms["scaling"] = Fact(kind | own, entries.where("rope_scaling"))
    where = entries.where(*(name for name in ("rope_local_base_freq", "rope_theta") if name in entries))
    local, everywhere = entries.pop("rope_local_base_freq", None), entries.pop("rope_theta", None)
    known = terms["theta"].value if "theta" in terms else None
    pair = known if isinstance(known, list | tuple) and len(known) == 2 else None
    if local is not None or (everywhere is not None and pair):
        pair = pair or (None, known)
        pair = (pair[0] if local is None else local, pair[1] if everywhere is None else everywhere)
        terms["theta"] = Fact(pair, where)
    elif everywhere is not None:
        terms["theta"] = Fact(everywhere, where)
    return has_scaling


def _check(given: object, where: str) -> None:
    """SourceError unless the caller's `rope_parameters`, of the model or of each kind of layer, are valid."""
    layers = isinstance(given, Mapping) and bool(given) and all(isinstance(part, Mapping) for part in given.values())
    parts = given.values() if layers and isinstance(given, Mapping) else [given]
    for part in parts:
        if not isinstance(part, Mapping) or not is_scaling({"rope_type": "default", **part}):
            raise SourceError(f"{where} = {shown(part)}: must be a mapping of finite numbers")


def rope_parameters(terms: Facts, usual: float = 1.0) -> dict[str, Any]:
    """Return `rope_parameters`; with sliding layers, one for each kind of layer.

    usual: the part of a head that the class turns without `partial_rotary_factor`.
    """
    theta = terms["theta"].value
    scaling = dict(terms["scaling"].value) if "scaling" in terms else {}
    if isinstance(theta, list | tuple):
        local, everywhere = theta
        return {
            SLIDING: {"rope_type": "default", "rope_theta": float(local)},
            FULL: {"rope_type": "default", "rope_theta": float(everywhere), **scaling},
        }
    share = terms["partial"].value if "partial" in terms else None
    partial = {} if share is None or share == usual == 1 else {"partial_rotary_factor": share}
    return {"rope_type": "default", "rope_theta": float(theta), **partial, **scaling}


@dataclass(frozen=True)
class Rope:
    """Rotary settings of a config, in the form of transformers 5."""

    theta: float
    kind: str
    scaling: Mapping[str, Any]
    local: float  # theta of the layers with a window
    share: float  # part of a head that is turned


def rope_of(config: Mapping[str, Any], theta: float = 1e4, share: float = 1.0) -> Rope:
    """Rotary settings, from `rope_parameters`, or `rope_theta` and `rope_scaling` of older versions.

    `theta`, `share`: what the architecture has without an entry.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    full = given.get(FULL, given) if isinstance(given, Mapping) else {}
    local = given.get(SLIDING, {}) if isinstance(given, Mapping) else {}
    base = float(full.get("rope_theta") or config.get("rope_theta") or theta)
    part = full.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    near = local.get("rope_theta") or config.get("rope_local_base_freq") or 1e4
    return Rope(base, str(full.get("rope_type") or full.get("type") or "default"), full, float(near), part or share)


def frequencies(rope: Rope, head_dim: int, context: int) -> np.ndarray:
    """The angle of each pair of channels per position, float32 [head_dim / 2]; `kind` is default, linear or llama3.

    As transformers computes them (`inv_freq`), but rounded once: float32 powers differ by an ulp between libraries.
    """
    plain = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "linear":
        plain = plain / float(rope.scaling["factor"])
    elif rope.kind == "llama3":
        plain = plain / llama3_factors(rope, head_dim, context)
    return plain.astype(np.float32)


def llama3_factors(rope: Rope, head_dim: int, context: int) -> np.ndarray:
    """What each frequency is divided by, float32, as `_compute_llama3_parameters` of transformers scales them."""
    given = rope.scaling
    factor, low, high = (float(given[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = int(given.get("original_max_position_embeddings") or context)
    factors = []
    for at in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope.theta ** (at / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
