"""Make the plan's `Structure` from a config and a checkpoint's tensors.

Exact cover: every source tensor belongs to one row, is tied, or is ignored by a rule; every row has all of its tensors.
One PlanError lists all problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from bridge.core.errors import PlanError
from bridge.core.text import number
from bridge.core.values import Cut, Feed, Site, Structure, TensorSpec
from bridge.tables.architectures.arch import ArchTable, load_arch
from bridge.tables.architectures.input_groups import groups_of, singles_of
from bridge.tables.architectures.match import Entry, Matched, architecture_of, match, numbered, role_shape
from bridge.tables.architectures.mismatches import problems
from bridge.tables.architectures.module_order import module_order
from bridge.tables.expressions.grammar import Call, Expr, Ref

Placed = tuple[str, tuple[Entry, int | None, int | None]]

_KEEP = {
    "head": "output head", "router": "router", "recurrent": "recurrent",
    "grouped": "a matrix for each group of heads, for which ModelOpt has no quantizer",
}  # fmt: skip
_CACHED = {"attn.q.weight", "mla.k_b.weight", "mqa.kv.weight"}  # one of each attention module
_MATRIX = 2  # axes


def structure(config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> Structure:
    """Return the structure of a checkpoint by its architecture's table.

    PlanError if no table lists the architecture (see `load_arch`) or the checkpoint does not fit it.
    """
    return of_match(match_table(config, specs))


def of_match(matched: Matched) -> Structure:
    """Return the structure of a checkpoint that fits its table."""
    order = module_order(matched)
    placed = [(name, matched.placed[name]) for name in order if name in matched.placed]
    place = {name: number for number, name in enumerate(order)}
    sites = [site for name, at in placed if (site := _site(matched, name, *at))] + _tied_heads(matched)
    sites.sort(key=lambda site: place[site.weight if site.stacked else f"{site.module}.weight"])
    return Structure(
        architecture=matched.architecture,
        sites=tuple(sites),
        attention=tuple(name.rsplit(".", 2)[0] for name, (entry, _, _) in placed if _CACHED & {*entry.roles}),
        tied=matched.tied,
        ignored=matched.ignored,
        roles=_roles(matched, placed),
        groups=groups_of(matched),
        order=order,
        embeddings=_embeddings(matched),
        singles=singles_of(matched),
        feeds=tuple(feeds_of(matched)),
        cuts=cuts_of(matched),
        joined={name: how for name, (entry, _, _) in placed if (how := _joined(entry.row.expr))},
        states=any(site.keep == _KEEP["recurrent"] for site in sites),
    )


def match_table(
    config: Mapping[str, object], specs: Mapping[str, TensorSpec], table: ArchTable | None = None
) -> Matched:
    """Match a checkpoint against `table` (default: the one that lists it); PlanError lists all problems."""
    architecture = architecture_of(config)
    table = table or load_arch(architecture)
    if table is None:
        raise PlanError(f"no file of mappings/arch lists the architecture {architecture!r}")
    matched = match(table, architecture, config, specs)
    if texts := problems(matched):
        head = f"{architecture} does not fit {table.file.name}: {number(len(texts), 'problem')}"
        raise PlanError("\n".join([head, *texts]))
    return matched


def canonical_names(config: Mapping[str, object], names: Iterable[str]) -> dict[str, str]:
    """Return current names of tensors that a checkpoint names differently; empty for most, or without a table.

    Hub checkpoints differ from the output of `save_pretrained` by a missing prefix (`h.0.ln_1.weight` of gpt2, saved
    from the bare model) and by old names (`LayerNorm.gamma`).
    """
    table = load_arch(architecture_of(config))
    names = list(names)
    if table is None:
        return {}
    has_prefix = any(name.startswith(table.prefix) for name in names)
    needs_prefix = architecture_of(config) not in table.bare
    owned = {row.name for row in (*table.rows, *table.ignored) if row.name.startswith(table.prefix)}
    heads = {name.removeprefix(table.prefix).split(".")[0] for name in owned}
    changed = {}
    for name in names:
        new = name
        if has_prefix and not needs_prefix:
            new = name.removeprefix(table.prefix)
        elif needs_prefix and not has_prefix and name.split(".")[0] in heads:
            new = table.prefix + name
        for old, modern in table.legacy.items():
            new = new.removesuffix(old) + modern if new.endswith(old) else new
        if new != name:
            changed[name] = new
    return changed


def turned_weights(config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that the architecture stores [in, out]; empty for most, or without a table."""
    table = load_arch(architecture_of(config))
    if table is None or not any(layout_of(row.expr) == "in_out" for row in table.rows):
        return {}
    placed = match(table, architecture_of(config), config, specs).placed
    return {name: entry.shape for name, (entry, _, _) in placed.items() if layout_of(entry.row.expr) == "in_out"}


def layout_of(expr: Expr | None) -> str:
    """How a row's tensor is stored: out_in or in_out, with stack_ before it if it has all experts."""
    if isinstance(expr, Call) and expr.op == "stack":
        return f"stack_{layout_of(expr.args[0])}"
    return "in_out" if isinstance(expr, Call) and expr.op == "transpose" else "out_in"


def _joined(expr: Expr | None) -> str:
    """How a row stacks gate and up of each expert as one matrix, see `Structure.joined`; "" if it does not."""
    if not (isinstance(expr, Call) and expr.op == "stack"):
        return ""
    (inner, *_) = expr.args
    inner = inner.args[0] if isinstance(inner, Call) and inner.op == "transpose" else inner
    kinds = {"interleave": "pairs", "concat": "halves"}
    return kinds.get(inner.op, "") if isinstance(inner, Call) else ""


def _embeddings(matched: Matched) -> tuple[str, ...]:
    vocabulary, scaled = matched.table.roles.roles, matched.table.scaled
    stored = {modern: name for name, modern in matched.legacy.items()}
    return tuple(
        stored.get(entry.name, entry.name).rpartition(".")[0]
        for entry in matched.entries
        if entry.expected and any(vocabulary[r].kind == "embedding" and r not in scaled for r in entry.roles)
    )


def _site(matched: Matched, name: str, entry: Entry, layer: int | None, expert: int | None) -> Site | None:
    kinds = {matched.table.roles.roles[role].kind for role in entry.roles}
    if not kinds & {"linear", *_KEEP}:
        return None
    convolves = len(entry.shape) > _MATRIX and not entry.row.stacks
    gated = expert is not None and entry.roles[0] in ("moe.gate.weight", "moe.up.weight")
    return Site(
        module=name.removesuffix(".weight") if entry.row.stacks else name.rpartition(".")[0],
        weight=name,
        layout="conv" if convolves else layout_of(entry.row.expr),
        roles=entry.roles,
        layer=layer,
        expert=expert,
        keep=next((_KEEP[kind] for kind in sorted(kinds) if kind in _KEEP), ""),
        shares=f"{layer}.{expert}" if gated else "",
        live=() if entry.row.stacks or expert is not None else _live(matched, name, entry, layer),
    )


def _live(matched: Matched, name: str, entry: Entry, layer: int | None) -> tuple[str, ...]:
    """The module of a row in the model of transformers, if the tensor has another name in the checkpoint."""
    table, module = matched.table, entry.row.name.removesuffix(".weight")
    live = table.live.get(module, module)
    if matched.architecture in table.bare:
        live = live.removeprefix(table.prefix)
    else:
        begin = next((begin for begin in table.live if begin.endswith(".") and live.startswith(begin)), "")
        live = table.live.get(begin, "") + live.removeprefix(begin)
    live = numbered(live, layer, None)
    return () if live == name.removesuffix(".weight") else (live,)


def _tied_heads(matched: Matched) -> list[Site]:
    """The sites of heads whose weight is stored as the embedding."""
    vocabulary = matched.table.roles.roles
    sites = []
    for entry in matched.entries:
        stored = matched.tied.get(entry.name)
        if stored and any(vocabulary[role].kind == "head" for role in entry.roles):
            module = entry.name.rpartition(".")[0]
            keep, live = f"output head, tied to {stored}", _live(matched, entry.name, entry, None)
            sites.append(Site(module, stored, "out_in", entry.roles, keep=keep, live=live))
    return sites


def _roles(matched: Matched, placed: list[Placed]) -> dict[str, tuple[str, ...]]:
    """The roles of every tensor, with those of its alias."""
    roles = {name: entry.roles for name, (entry, _, _) in placed}
    for alias, stored in matched.tied.items():
        for entry in matched.entries:
            if entry.name == alias and stored in roles:
                roles[stored] += entry.roles
    return roles


# Dims of the inside of attention or of an MLP: ranks compute it apart, and add up what is `hidden` wide again.
SHARED = {
    "heads": "query heads",
    "kv_heads": "KV heads",
    "out_groups": "groups of heads",
    "ffn": "inner values of the MLP",
    "moe_ffn": "inner values of an expert",
    "shared_ffn": "inner values of the shared experts",
    "ssm_heads": "heads of the state space",
    "ssm_groups": "groups of its heads",
}


def cuts_of(matched: Matched) -> dict[str, Cut]:
    """Return the roles of matrices that ranks share, each with the axis that they cut.

    None where layers have dims of their own: the same ranks would share other counts in each.
    """
    cuts: dict[str, Cut] = {}
    if matched.table.dims_of_layer:
        return cuts
    for entry in matched.entries:
        for name in entry.roles if entry.expected else ():
            role = matched.table.roles.roles[name]
            if role.kind != "linear" or name in cuts:
                continue
            extents = role_shape(matched.table, name, entry.names)
            for axis, formula, extent in zip(("out", "in"), role.shape, extents, strict=True):
                for dim in sorted(formula.names & SHARED.keys()):
                    count = int(str(entry.names[dim]))
                    cuts[name] = Cut(axis, SHARED[dim], count, extent // count, dim in ("kv_heads", "ssm_groups"))
    return cuts


# Writer -> reader. A gate multiplies what `up` writes and attention adds it up; neither mixes its rows. What `fc1`
# writes passes through an activation.
PAIRS = {
    "mlp.up.weight": "mlp.down.weight",
    "moe.shared.up.weight": "moe.shared.down.weight",
    "attn.v.weight": "attn.o.weight",
}


def feeds_of(matched: Matched) -> Iterator[Feed]:
    """Yield the pairs of one layer whose matrices are stored [out, in], layer by layer."""
    at = matched.by_role()
    for layer in sorted({layer for _, layer in at if layer is not None}):
        for wrote, reads in PAIRS.items():
            if (wrote, layer) not in at or (reads, layer) not in at:
                continue
            (writer, entry), (reader, other) = at[wrote, layer], at[reads, layer]
            rows = _rows(matched, entry, wrote)
            if rows is None or not isinstance(other.row.expr, Ref):
                continue
            width = int(str(entry.names["head_dim"])) if wrote == "attn.v.weight" else 1
            repeat, rest = divmod(other.shape[1], rows[1] - rows[0])
            if not rest:
                modules = writer.rpartition(".")[0], reader.rpartition(".")[0]
                yield Feed(modules[0], rows, modules[1], repeat, width)


def _rows(matched: Matched, entry: Entry, role: str) -> tuple[int, int] | None:
    """The rows of a role in its tensor; None if they are not consecutive rows."""
    expr = entry.row.expr
    if isinstance(expr, Ref):
        return 0, entry.shape[0]
    if not isinstance(expr, Call) or expr.op != "concat":
        return None
    begin = 0
    for part in expr.args:
        if not isinstance(part, Ref):
            return None
        end = begin + role_shape(matched.table, part.name, entry.names)[0]
        if part.name == role:
            return begin, end
        begin = end
    return None
