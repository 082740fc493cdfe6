"""Rotary embeddings as transformers 5 writes them: of our terms, and of a caller's older fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.errors import SourceError
from bridge.sources.foreign_config.kinds import is_scaling
from bridge.sources.foreign_config.said import Given, Said, Saying, shown


def take_rope(terms: dict[str, Said], entries: Given) -> bool:
    """Put the caller's rotary fields in the place of what is said; return whether they tell the scaling.

    Older fields are taken out of `entries`: beside `rope_parameters` transformers would not look at them.
    """
    if "rope_parameters" in entries:
        _check(entries["rope_parameters"], entries.where("rope_parameters"))
        for term in ("theta", "scaling", "partial"):
            terms.pop(term, None)
        return True
    if "partial_rotary_factor" in entries:
        terms["partial"] = Said(entries.pop("partial_rotary_factor"), entries.where("partial_rotary_factor"))
    told = "rope_scaling" in entries
    if told:
        given = entries.pop("rope_scaling")
        if not isinstance(given, Mapping | None):
            raise SourceError(f"{entries.where('rope_scaling')} = {shown(given)}: must be a mapping or null")
        terms.pop("scaling", None)
        if given:
            kind = {"rope_type": given["type"]} if "type" in given else {}
            own = {name: value for name, value in given.items() if name != "type"}
            terms["scaling"] = Said(kind | own, entries.where("rope_scaling"))
    where = entries.where(*(name for name in ("rope_local_base_freq", "rope_theta") if name in entries))
    local, everywhere = entries.pop("rope_local_base_freq", None), entries.pop("rope_theta", None)
    known = terms["theta"].value if "theta" in terms else None
    pair = known if isinstance(known, list | tuple) and len(known) == 2 else None
    if local is not None or (everywhere is not None and pair):
        pair = pair or (None, known)
        pair = (pair[0] if local is None else local, pair[1] if everywhere is None else everywhere)
        terms["theta"] = Said(pair, where)
    elif everywhere is not None:
        terms["theta"] = Said(everywhere, where)
    return told


def _check(given: object, where: str) -> None:
    """SourceError where the caller's `rope_parameters`, of the model or of each kind of layer, are none."""
    layers = isinstance(given, Mapping) and bool(given) and all(isinstance(part, Mapping) for part in given.values())
    parts = given.values() if layers and isinstance(given, Mapping) else [given]
    for part in parts:
        if not isinstance(part, Mapping) or not is_scaling({"rope_type": "default", **part}):
            raise SourceError(f"{where} = {shown(part)}: must be a mapping of finite numbers")


def rope_parameters(terms: Saying) -> dict[str, Any]:
    """Return `rope_parameters`; where layers slide, one for each kind of layer."""
    theta = terms["theta"].value
    scaling = dict(terms["scaling"].value) if "scaling" in terms else {}
    if isinstance(theta, list | tuple):
        local, everywhere = theta
        return {
            "sliding_attention": {"rope_type": "default", "rope_theta": float(local)},
            "full_attention": {"rope_type": "default", "rope_theta": float(everywhere), **scaling},
        }
    partial = {"partial_rotary_factor": terms["partial"].value} if "partial" in terms else {}
    if partial.get("partial_rotary_factor") == 1:
        partial = {}
    return {"rope_type": "default", "rope_theta": float(theta), **partial, **scaling}
