"""Describe mismatches of checkpoint and table, with the row to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from bridge.core.text import fold_layers, grouped
from bridge.core.values import TensorSpec
from bridge.tables.architectures.arch import INDEX
from bridge.tables.architectures.match import Entry, Matched


def problems(matched: Matched) -> list[str]:
    """Return one paragraph for each problem: missing tensors, wrong shapes, unknown tensors; layers folded."""
    texts = [_missing(matched, entry, names) for entry, names in matched.missing]
    misshapen = grouped(matched.misshapen, lambda at: (id(at[1]), at[0].shape))
    texts += [_misshapen(matched, pairs[0][1], [spec for spec, _ in pairs]) for pairs in misshapen]
    unknown = grouped(matched.unknown, lambda spec: (_template(matched, spec.name), spec.shape))
    return texts + [_unknown(matched, specs) for specs in unknown]


def folded(names: Iterable[str]) -> str:
    """Fold layers, then experts."""
    listed = list(names)
    return listed[0] if len(listed) == 1 else ", ".join(fold_layers(listed))


def _missing(matched: Matched, entry: Entry, names: list[str]) -> str:
    because = f", because {entry.row.when} ({_values(matched, entry)})" if entry.row.when else ""
    lines = [
        f"  missing  {folded(names)} {entry.shape}{because}",
        f"           {entry.row.place.file}:{entry.row.place.line}: {entry.row.place.row}",
    ]
    for tie in matched.table.ties:
        if tie.alias.endswith(entry.name) and not tie.when.value(matched.names):
            hint = f"the config has {tie.when} = {tie.when.value(matched.names)}; if true, {tie.stored} is used"
            lines.append(f"           hint: {hint}")
    near = [s.name for s in matched.unknown if _template(matched, s.name).split(".")[-2:] == entry.name.split(".")[-2:]]
    if near:
        lines.append(f"           hint: is it {folded(near)}?")
    return "\n".join(lines)


def _misshapen(matched: Matched, entry: Entry, specs: list[TensorSpec]) -> str:
    lines = [
        f"  shape    {folded(s.name for s in specs)} has {specs[0].shape}, the config gives {entry.shape}",
        f"           {entry.row.place.file}:{entry.row.place.line}: {entry.row.place.row}",
        f"           {' + '.join(_symbols(matched, role, entry.names) for role in entry.roles)}",
    ]
    return "\n".join(lines)


def _symbols(matched: Matched, role: str, names: Mapping[str, object]) -> str:
    formulas = matched.table.roles.roles[role].shape
    dims = sorted({name for formula in formulas for name in formula.names})
    values = ", ".join(f"{dim} = {names[dim]}" for dim in dims)
    return f"{role} ({', '.join(map(str, formulas))}) with {values}"


def _unknown(matched: Matched, specs: list[TensorSpec]) -> str:
    template = _template(matched, specs[0].name)
    lines = [f"  unknown  {folded(spec.name for spec in specs)} {specs[0].shape}"]
    rows = [row for row in (*matched.table.rows, *matched.table.ignored) if _same(row.name, template, matched)]
    for row in rows:
        entry = next(entry for entry in matched.entries if entry.row is row)
        lines.append(f"           {row.place.file}:{row.place.line}: {row.place.row}")
        if row.only and matched.architecture not in row.only:
            lines.append(f"           that row is for {', '.join(row.only)}")
        elif row.when and entry.layers is not None:
            lines.append(f"           that row requires {row.when}; the config gives {_values(matched, entry)}")
        elif entry.extents:
            at = ", ".join(f"{{{index}}} < {extent}" for index, extent in zip(row.index, entry.extents, strict=True))
            lines.append(f"           the config gives {at}: another model's config, or extra layers?")
    if not rows:
        known = [entry.name for entry in matched.entries]
        near = difflib.get_close_matches(template, known, n=1, cutoff=0.6)
        lines += [f"           nearest row: {near[0]}"] if near else []
        roles = _candidates(matched, specs[0])
        lines.append(f'           write in {matched.table.file.name}: "{template}" = "{roles}"')
        lines.append(f'           or, if the model does not use it, under [ignore]: "{template}" = "why not"')
    return "\n".join(lines)


def _candidates(matched: Matched, spec: TensorSpec) -> str:
    """The roles of the same shape that the architecture does not have yet."""
    taken = {role for entry in matched.entries for role in entry.roles}
    fits = []
    for role in matched.table.roles.roles.values():
        dims = {name for formula in role.shape for name in formula.names}
        if role.name in taken or not dims <= matched.names.keys():
            continue
        if tuple(formula.count(matched.names) for formula in role.shape) == spec.shape:
            fits.append(role.name)
    return " or ".join(fits[:3]) or "a new role of mappings/roles.toml"


def _template(matched: Matched, name: str) -> str:
    """The name with indices for its numbers: the first counts layers, the second experts."""
    indices = iter(matched.table.roles.index)
    return ".".join("{" + next(indices, "n") + "}" if part.isdecimal() else part for part in name.split("."))


def _same(row: str, template: str, matched: Matched) -> bool:
    ours, theirs, prefix = INDEX.sub("{}", row), INDEX.sub("{}", template), matched.table.prefix
    return ours == theirs or (not matched.prefix and ours.removeprefix(prefix) == theirs)


def _values(matched: Matched, entry: Entry) -> str:
    names = sorted(entry.row.when.names - {"l"}) if entry.row.when else []
    return ", ".join(f"{name} = {matched.names[name]!r}" for name in names)
