"""Rotary embeddings in the form of transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.core.errors import SourceError
from bridge.sources.configs.facts import Fact, Facts, Given, shown
from bridge.sources.configs.kinds import is_scaling


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


def rope_parameters(terms: Facts) -> dict[str, Any]:
    """Return `rope_parameters`; with sliding layers, one for each kind of layer."""
    theta = terms["theta"].value
    scaling = dict(terms["scaling"].value) if "scaling" in terms else {}
    if isinstance(theta, list | tuple):
        local, everywhere = theta
        return {
            "sliding_attention": {"rope_type": "default", "rope_theta": float(local)},
            "full_attention": {"rope_type": "default", "rope_theta": float(everywhere), **scaling},
        }
    share = terms["partial"].value if "partial" in terms else 1
    partial = {"partial_rotary_factor": share} if share != 1 else {}
    return {"rope_type": "default", "rope_theta": float(theta), **partial, **scaling}
