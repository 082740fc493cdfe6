"""A plan read back from JSON, as a written model's manifest holds it; the inverse of `Plan.to_dict`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.planning import Output, Plan, Step
from bridge.values import Coding, Format, Numeric, Site, Slice, TensorSpec


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """Rebuild a plan from `Plan.to_dict`, as read back from a written model's manifest."""
    plain = {f.name: data[f.name] for f in dataclasses.fields(Plan) if f.name not in ("sources", "steps")}
    for name in ("side_files", "notes"):
        plain[name] = tuple(plain[name])
    return Plan(
        **plain,
        sources={name: _spec_from_dict(d) for name, d in data["sources"].items()},
        steps=tuple(_step_from_dict(d) for d in data["steps"]),
    )


def _spec_from_dict(data: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(data["name"], tuple(data["shape"]), data["dtype"], data.get("across", False))


def _step_from_dict(data: Mapping[str, Any]) -> Step:
    site, format_ = data["site"], data["format"]
    made = {
        "inputs": tuple(Slice(**{**d, "rows": _pair(d["rows"]), "cols": _pair(d["cols"])}) for d in data["inputs"]),
        "outputs": tuple(Output(**{**d, "spec": _spec_from_dict(d["spec"])}) for d in data["outputs"]),
        "site": Site(**{**site, "roles": tuple(site["roles"])}) if site else None,
        "format": _format_from_dict(format_) if format_ else None,
        "coding": Coding(**data["coding"]),
        "kv": _numeric_from_dict(data["kv"]) if data["kv"] else None,
    }
    made |= {name: tuple(data[name]) for name in ("unified", "folded")}
    return Step(**{**data, **made})


def _pair(data: list[int] | None) -> tuple[int, int] | None:
    return (data[0], data[1]) if data else None


def _numeric_from_dict(data: Mapping[str, Any]) -> Numeric:
    return Numeric(**{**data, "block": tuple(data["block"])})


def _format_from_dict(data: Mapping[str, Any]) -> Format:
    fields = dict(data)
    fields["weight"] = tuple(_numeric_from_dict(n) for n in data["weight"])
    fields["input"] = _numeric_from_dict(data["input"]) if data["input"] else None
    return Format(**fields)
