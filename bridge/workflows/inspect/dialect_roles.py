"""Roles of a live model that is not of transformers, by the dialects' rows.

The dialect that knows most of the parameters' names is taken. A parameter without a row takes the rows of the state's
keys beside it: torchtitan saves `wqkv` as three tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge.tables.architectures.roles import load_roles
from bridge.tables.dialects.dialect import Dialect, DialectRow, dialect_names, load_dialect
from bridge.tables.dialects.translate import row_pattern
from bridge.workflows.inspect.layers import MATRICES, Meaning, clean

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Named = tuple[DialectRow, int | None]  # the row of a name, and its layer


def dialect_meanings(model: Any) -> Mapping[tuple[str, int | None], Meaning]:
    """The roles of a model's parameters; empty if no dialect knows any of them."""
    names = [clean(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    state = [clean(name) for name in model.state_dict()]
    best: dict[str, Named] = {}
    for rows_of in _readers(_absent_sets(model)):
        found = {name: row for name in dict.fromkeys((*names, *state)) if (row := rows_of(name)) is not None}
        if len(found) > len(best):
            best = found
    meanings = {name: _meaning([best[name]]) for name in names if name in best}
    beside = [name for name in state if name in best and name not in names]
    for name in names:
        if name not in best and (rows := [best[key] for key in beside if _shares(key, name)]):
            meanings[name] = _meaning(rows)
    return {(name, None): meaning for name, meaning in meanings.items() if meaning.roles}


def _readers(absent: tuple[frozenset[str], ...]) -> Iterator[Callable[[str], Named | None]]:
    """One function for each layout of each dialect: the row of a name, and its layer."""
    for dialect in map(load_dialect, dialect_names()):
        for word in sorted({*dialect.architectures.values()}):
            rows = [row for row in dialect.rows if row.only in ("", word) and frozenset(row.needs) not in absent]
            yield _reader(dialect, rows)


def _reader(dialect: Dialect, rows: list[DialectRow]) -> Callable[[str], Named | None]:
    patterns = [(row_pattern(row.name), row) for row in rows]
    by_kind: dict[str, tuple[re.Pattern[str], DialectRow] | None] = {}  # names that differ only in numbers share a row

    def read(name: str) -> Named | None:
        bare = dialect.bare(name)
        kind = _NUMBER.sub("{}", bare)
        if kind not in by_kind:
            by_kind[kind] = next((pair for pair in patterns if pair[0].fullmatch(bare)), None)
        pair = by_kind[kind]
        match = pair[0].fullmatch(bare) if pair else None
        if pair is None or match is None:
            return None
        layer = match.groupdict().get("l")
        return pair[1], None if layer is None else int(layer)

    return read


def _absent_sets(model: Any) -> tuple[frozenset[str], ...]:
    """Roles that layers of Megatron-Core cannot have: its gated and its plain MLP have the same names."""
    gated = getattr(getattr(model, "config", None), "gated_linear_unit", None)
    if gated is None:
        return ()
    return (frozenset(load_roles().together["plain" if gated else "gated"]),)


def _meaning(rows: list[Named]) -> Meaning:
    vocabulary = load_roles().roles
    roles = [role for row, _ in rows for role in row.roles if vocabulary[role].kind in MATRICES]
    return Meaning(tuple(dict.fromkeys(roles)), rows[0][1])


def _shares(key: str, name: str) -> bool:
    """Whether a key of the state lies beside a parameter: `wq.weight` beside `wqkv.weight`."""
    return key.rpartition(".")[2] == name.rpartition(".")[2] and _parent(key) == _parent(name)


def _parent(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[0]
