"""Turns a config and the tensors of a checkpoint into the Structure that the plan needs; reads no weight.

Exact cover: every source tensor belongs to one row, is tied, or is ignored by a rule; every row finds its tensors. All
that does not fit is told in one PlanError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bridge.errors import PlanError
from bridge.tables.arch import ArchTable, Row, load_arch
from bridge.tables.fit import problems
from bridge.tables.grammar import Call, Expr
from bridge.tables.match import Entry, Matched, architecture_of, match
from bridge.tables.modules import module_order
from bridge.tables.reads import groups_of
from bridge.values import Site, Structure, TensorSpec

__all__ = ["canonical_names", "load_arch", "match_table", "structure", "turned_weights"]

Found = tuple[str, tuple[Entry, int | None, int | None]]

_KEEP = {"head": "output head", "router": "router"}
_CACHED = {"attn.k.weight", "mla.kv_b.weight"}  # one of each attention module that has keys


def structure(config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> Structure:
    """Return the structure of a checkpoint by its architecture's table.

    PlanError when no table lists the architecture (`load_arch` tells beforehand) or anything does not fit it.
    """
    matched = match_table(config, specs)
    order = module_order(matched)
    found = [(name, matched.found[name]) for name in order if name in matched.found]
    place = {name: number for number, name in enumerate(order)}
    sites = [site for name, at in found if (site := _site(matched, name, *at))] + _tied_heads(matched)
    sites.sort(key=lambda site: place[site.weight if site.stacked else f"{site.module}.weight"])
    return Structure(
        architecture=matched.architecture,
        sites=tuple(sites),
        attention=tuple(name.rsplit(".", 2)[0] for name, (entry, _, _) in found if _CACHED & {*entry.roles}),
        tied=matched.tied,
        ignored=matched.ignored,
        roles=_roles(matched, found),
        groups=groups_of(matched),
        order=order,
        embeddings=_embeddings(matched),
    )


def match_table(
    config: Mapping[str, object], specs: Mapping[str, TensorSpec], table: ArchTable | None = None
) -> Matched:
    """Match a checkpoint against `table` (default: the one that lists it); PlanError with all problems."""
    architecture = architecture_of(config)
    table = table or load_arch(architecture)
    if table is None:
        raise PlanError(f"no file of mappings/arch lists the architecture {architecture!r}")
    matched = match(table, architecture, config, specs)
    found = problems(matched)
    if found:
        counted = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
        raise PlanError("\n".join([f"{architecture} does not fit {table.file.name}: {counted}", *found]))
    return matched


def canonical_names(config: Mapping[str, object], names: Iterable[str]) -> dict[str, str]:
    """Return today's spelling of tensors that a checkpoint spells otherwise; empty for most, or without a table.

    Hub checkpoints differ from what `save_pretrained` writes by a missing prefix (`h.0.ln_1.weight` of gpt2, saved from
    the bare model) and by names of long ago (`LayerNorm.gamma`).
    """
    table = load_arch(architecture_of(config))
    names = list(names)
    if table is None:
        return {}
    has = any(name.startswith(table.prefix) for name in names)
    wants = architecture_of(config) not in table.bare
    owned = {row.name for row in (*table.rows, *table.ignored) if row.name.startswith(table.prefix)}
    heads = {name.removeprefix(table.prefix).split(".")[0] for name in owned}
    changed = {}
    for name in names:
        new = name
        if has and not wants:
            new = name.removeprefix(table.prefix)
        elif wants and not has and name.split(".")[0] in heads:
            new = table.prefix + name
        for old, modern in table.legacy.items():
            new = new.removesuffix(old) + modern if new.endswith(old) else new
        if new != name:
            changed[name] = new
    return changed


def turned_weights(config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that the architecture has as [in, out]: none for most, or without a table."""
    table = load_arch(architecture_of(config))
    if table is None or not any(_is_turned(row) for row in table.rows):
        return {}
    found = match(table, architecture_of(config), config, specs).found
    return {name: entry.shape for name, (entry, _, _) in found.items() if _is_turned(entry.row)}


def _is_turned(row: Row) -> bool:
    return _layout(row.expr) == "in_out"


def _layout(expr: Expr | None) -> str:
    if isinstance(expr, Call) and expr.op == "stack":
        return f"stack_{_layout(expr.args[0])}"
    return "in_out" if isinstance(expr, Call) and expr.op == "transpose" else "out_in"


def _embeddings(matched: Matched) -> tuple[str, ...]:
    vocabulary, scaled = matched.table.roles.roles, matched.table.scaled
    held = [entry for entry in matched.entries if entry.expected and entry.row.expr]
    plain = [e for e in held if any(vocabulary[role].kind == "embedding" and role not in scaled for role in e.roles)]
    return tuple(entry.name.rpartition(".")[0] for entry in plain)


def _site(matched: Matched, name: str, entry: Entry, layer: int | None, expert: int | None) -> Site | None:
    kinds = {matched.table.roles.roles[role].kind for role in entry.roles}
    if not kinds & {"linear", "head", "router"}:
        return None
    gated = expert is not None and entry.roles[0] in ("moe.gate.weight", "moe.up.weight")
    return Site(
        module=name if entry.row.stacks else name.rpartition(".")[0],
        weight=name,
        layout=_layout(entry.row.expr),
        roles=entry.roles,
        layer=layer,
        expert=expert,
        keep=next((_KEEP[kind] for kind in sorted(kinds) if kind in _KEEP), ""),
        shares=f"{layer}.{expert}" if gated else "",
    )


def _tied_heads(matched: Matched) -> list[Site]:
    """Return the sites of heads whose weight is stored as the embedding."""
    vocabulary = matched.table.roles.roles
    sites = []
    for entry in matched.entries:
        stored = matched.tied.get(entry.name)
        if stored and any(vocabulary[role].kind == "head" for role in entry.roles):
            module = entry.name.rpartition(".")[0]
            sites.append(Site(module, stored, "out_in", entry.roles, keep=f"output head, tied to {stored}"))
    return sites


def _roles(matched: Matched, found: list[Found]) -> dict[str, tuple[str, ...]]:
    """Return the roles of every tensor, with those of its alias."""
    roles = {name: entry.roles for name, (entry, _, _) in found}
    for alias, stored in matched.tied.items():
        for entry in matched.entries:
            if entry.name == alias and stored in roles:
                roles[stored] += entry.roles
    return roles
