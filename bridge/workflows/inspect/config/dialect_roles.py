"""Roles of a live model by the rows of dialects.

The dialect that knows most of the parameters' names is taken, if it knows more than half. A parameter without a row
takes the rows of the state's keys beside it: torchtitan saves `wqkv` as three tensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.tables.architectures.roles import load_roles
from bridge.tables.architectures.structure import layout_of
from bridge.tables.dialects.dialect import Dialect, DialectRow, dialect_names, load_dialect
from bridge.tables.dialects.translate import row_pattern
from bridge.workflows.inspect.config.layers import MATRICES, Meaning, clean

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Candidates:
    """The layer of a name, and its rows; some layouts use one name for two things."""

    layer: int | None
    rows: tuple[DialectRow, ...]


def dialect_meanings(model: Any) -> Mapping[tuple[str, int | None], Meaning]:
    """The roles of a model's parameters; empty if no dialect knows most of them."""
    names = [clean(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    keys = [key for key in map(clean, model.state_dict()) if key not in names]
    best: dict[str, Candidates] = {}
    for read in _readers(_absent_sets(model)):
        found = {name: rows for name in (*names, *keys) if (rows := read(name)) is not None}
        if len(found) > len(best):
            best = found
    if 2 * len([name for name in names if name in best]) <= len(names):
        return {}
    stems = _stems(best)
    meanings = {name: _meaning([best[name]], stems) for name in names if name in best}
    for name in names:
        if name not in best and (beside := [best[key] for key in keys if key in best and _is_beside(key, name)]):
            meanings[name] = _meaning(beside, stems)
    return {(name, None): meaning for name, meaning in meanings.items() if meaning.roles}


def _readers(absent: tuple[frozenset[str], ...]) -> Iterator[Callable[[str], Candidates | None]]:
    """One function for each layout of each dialect."""
    for dialect in map(load_dialect, dialect_names()):
        for word in sorted({*dialect.architectures.values()}):
            rows = [row for row in dialect.rows if row.only in ("", word) and frozenset(row.needs) not in absent]
            yield _reader(dialect, rows)


def _reader(dialect: Dialect, rows: list[DialectRow]) -> Callable[[str], Candidates | None]:
    patterns = [(row_pattern(row.name), row) for row in rows]
    by_kind: dict[
        str, list[tuple[re.Pattern[str], DialectRow]]
    ] = {}  # names that differ only in numbers share their rows

    def read(name: str) -> Candidates | None:
        bare = dialect.bare(name)
        kind = _NUMBER.sub("{}", bare)
        if kind not in by_kind:
            by_kind[kind] = [pair for pair in patterns if pair[0].fullmatch(bare)]
        found = by_kind[kind]
        match = found[0][0].fullmatch(bare) if found else None
        if match is None:
            return None
        layer = match.groupdict().get("l")
        return Candidates(None if layer is None else int(layer), tuple({row.roles: row for _, row in found}.values()))

    return read


def _absent_sets(model: Any) -> tuple[frozenset[str], ...]:
    """Roles that layers of Megatron-Core cannot have: its gated and its plain MLP have the same names."""
    gated = getattr(getattr(model, "config", None), "gated_linear_unit", None)
    if gated is None:
        return ()
    return (frozenset(load_roles().together["plain" if gated else "gated"]),)


def _stems(best: Mapping[str, Candidates]) -> Counter[tuple[int | None, str]]:
    """How many matrices of a layer are surely of attention, of latent attention, of an MLP."""
    sure = [(each.layer, each.rows[0]) for each in best.values() if len(each.rows) == 1]
    return Counter((layer, role.partition(".")[0]) for layer, row in sure for role in _matrices(row))


def _meaning(candidates: list[Candidates], stems: Counter[tuple[int | None, str]]) -> Meaning:
    """The roles of one parameter: of a name with two meanings, that of which the layer has other matrices."""

    def others(layer: int | None, row: DialectRow) -> int:
        return sum(stems[layer, role.partition(".")[0]] for role in row.roles)

    layer = candidates[0].layer
    chosen = [max(each.rows, key=lambda row: others(layer, row)) for each in candidates]
    roles = dict.fromkeys(role for row in chosen for role in _matrices(row))
    return Meaning(tuple(roles), layer, layout_of(chosen[0].expr).endswith("in_out"))


def _matrices(row: DialectRow) -> list[str]:
    vocabulary = load_roles().roles
    return [role for role in row.roles if vocabulary[role].kind in MATRICES]


def _is_beside(key: str, name: str) -> bool:
    """Whether a key of the state lies beside a parameter: `wq.weight` beside `wqkv.weight`."""
    return key.rpartition(".")[2] == name.rpartition(".")[2] and _parent(key) == _parent(name)


def _parent(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[0]
