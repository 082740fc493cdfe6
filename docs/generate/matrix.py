"""What goes with what, as Markdown tables: schemes and KV caches by target, architectures, dialects.

It says what can be expressed and planned; what was run and measured is the business of tests and benchmarks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from bridge.describe import architectures, needs, numeric, weights
from bridge.quant.scheme import Scheme, kv_names, load_scheme, scheme_names, with_kv
from bridge.sources.foreign_config.families import parse_family
from bridge.sources.foreign_source import DIALECTS
from bridge.tables.arch import load_roles, parse_arch
from bridge.tables.dialect import Dialect, dialect_names, load_dialect
from bridge.tables.files import TableFile, own_files, read_table
from bridge.tables.grammar import roles_in
from bridge.targets import Target, load_target, target_names
from bridge.values import Structure


def matrix() -> str:
    """Schemes by target, KV caches by target, architectures that have tables, and dialects by those."""
    return "\n\n".join([schemes(), caches(), tables(), dialects()])


def schemes() -> str:
    """What each scheme is, and which targets take it."""
    targets = [load_target(name) for name in target_names()]
    known = [load_scheme(name) for name in scheme_names()]
    rows = [[f"`{s.name}`", weights(s), numeric(s.input), _where(s), *(cell(s, t) for t in targets)] for s in known]
    return table(["scheme", "weights", "activations", "calibration", *_named(targets)], rows)


def caches() -> str:
    """What `kv=` takes, and which targets take that."""
    targets = [load_target(name) for name in target_names()]
    known = [(name, with_kv(load_scheme("fp8"), name)) for name in kv_names()]
    rows = [[f"`{name}`", numeric(scheme.kv), *(kv_cell(scheme, t) for t in targets)] for name, scheme in known]
    return table(["`kv`", "codes", *_named(targets)], rows)


def _named(targets: Iterable[Target]) -> list[str]:
    return [f"`{target.name}`" for target in targets]


def tables() -> str:
    """The classes of transformers that each table describes."""
    rows = [[f"`{name}`", ", ".join(f"`{c}`" for c in classes)] for name, classes in architectures().items()]
    return table(["table", "architectures"], rows)


def dialects() -> str:
    """Markdown: what is read from each dialect and written in it, by table, and what it cannot say."""
    known = {name: load_dialect(name) for name in dialect_names()}
    rows, notes = [], {}
    for path in own_files("arch"):
        arch = parse_arch(read_table(path), load_roles())
        held = {role for row in arch.rows for role in roles_in(row.expr)}
        cells = []
        for name, dialect in known.items():
            here = sorted(set(arch.architectures) & dialect.architectures.keys())
            words = {dialect.architectures[found] for found in here}
            told = {role for row in dialect.rows if row.only in ("", *words) for role in row.roles}
            lacking = sorted({dialect.absent[role] for role in (held & dialect.absent.keys()) - told})
            marks = [str(notes.setdefault(why, len(notes) + 1)) for why in lacking] if here else []
            cells.append(" ".join([_said(name, dialect, arch.file) if here else "no", *(f"[{m}]" for m in marks)]))
        rows.append([f"`{path.stem}`", *cells])
    whys = [f"[{mark}] Refused where a model has one: {why}." for why, mark in notes.items()]
    return "\n\n".join([table(["table", *(f"`{name}`" for name in known)], rows), " ".join(whys)])


def _said(name: str, dialect: Dialect, file: TableFile) -> str:
    """`read`, where its configuration can be made or lies beside it, and `written`, where it is a target."""
    reads = dialect.files is not None or (name in DIALECTS and parse_family(file) is not None)
    return ", ".join(["read"] * reads + ["written"] * (name in target_names())) or "no"


def cell(scheme: Scheme, target: Target) -> str:
    """`yes`, the flag that it takes, or `no`."""
    plain = target.Options()
    if _fits(scheme, target, plain):
        return "yes"
    for entry in dataclasses.fields(plain):
        if entry.default is False and _fits(scheme, target, dataclasses.replace(plain, **{entry.name: True})):
            return f"`--{entry.name.replace('_', '-')}`"
    return "no"


def _fits(scheme: Scheme, target: Target, options: Any) -> bool:
    return not any(target.refuse(format_, options) for format_ in scheme.formats)


def kv_cell(scheme: Scheme, target: Target) -> str:
    """`yes` or `no`, for the KV cache of `scheme`."""
    assert scheme.kv is not None
    some = Structure("any", (), attention=("model.layers.0.self_attn",))
    return "no" if target.refuse_kv(scheme.kv, some, target.Options()) else "yes"


def _where(scheme: Scheme) -> str:
    return needs(scheme).partition(":")[0]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows])
