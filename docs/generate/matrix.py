"""The support matrix as Markdown tables: schemes and KV caches by target, architectures, dialects.

It says what can be expressed and planned. Tests and benchmarks say what was run and measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from bridge.api.advice import chosen_by_sign
from bridge.cli.show import architectures
from bridge.core.mappings import TableFile, own_files, read_table
from bridge.core.values import Structure
from bridge.planning.contract_files import runtimes
from bridge.quant.describe import needs, numeric, weights
from bridge.quant.schemes.catalog import RULE, kv_names, scheme_names
from bridge.quant.schemes.load import load_scheme, with_kv
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.configs.families import parse_family
from bridge.sources.dialects.opening import DIALECTS
from bridge.tables.architectures.arch import parse_arch
from bridge.tables.architectures.roles import load_roles
from bridge.tables.dialects.dialect import Dialect, dialect_names, load_dialect
from bridge.tables.expressions.grammar import roles_in
from bridge.targets import Target, load_target, target_names


def schemes() -> str:
    """What each scheme is, and which targets take it; those that take none are left out."""
    targets = [load_target(name) for name in target_names()]
    targets = [target for target in targets if any(cell(load_scheme(s), target) != "no" for s in scheme_names())]
    known = [load_scheme(name) for name in scheme_names()]
    rows = [[f"`{s.name}`", weights(s), numeric(s.input), _where(s), *(cell(s, t) for t in targets)] for s in known]
    return table(["scheme", "weights", "activations", "calibration", *_named(targets)], rows)


def caches() -> str:
    """The values of `kv=`, and which targets take each."""
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
    """What is read and written in each dialect, by table, and what the dialect cannot express."""
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
    """`read` if its configuration is found or derived, `written` if it is a target."""
    reads = dialect.files is not None or (name in DIALECTS and parse_family(file) is not None)
    return ", ".join(["read"] * reads + ["written"] * (name in target_names())) or "no"


def address(name: str) -> str:
    """The address of a scheme's page, `schemes/int4-rtn.md` of `int4:rtn`."""
    return f"schemes/{name.replace(RULE, '-')}.md"


def cell(scheme: Scheme, target: Target) -> str:
    """`yes`, the flag that it takes, or `no`."""
    plain = target.Options()
    if chosen_by_sign(scheme) and not _takes_either_sign(target):
        return "no"
    if _fits(scheme, target, plain):
        return "yes"
    for entry in dataclasses.fields(plain):
        if entry.default is False and _fits(scheme, target, dataclasses.replace(plain, **{entry.name: True})):
            return f"`--{entry.name.replace('_', '-')}`"
    return "no"


def _takes_either_sign(target: Target) -> bool:
    """Whether a program reads negative scales of what a target writes."""
    return any(one.either for program in runtimes() for one in program.contracts if one.target == target.name)


def _fits(scheme: Scheme, target: Target, options: Any) -> bool:
    return not any(target.why_unsupported(format_, options) for format_ in scheme.formats)


def kv_cell(scheme: Scheme, target: Target) -> str:
    """`yes` or `no`, for the KV cache of `scheme`."""
    assert scheme.kv is not None
    some = Structure("any", (), attention=("model.layers.0.self_attn",))
    return "no" if target.why_kv_unsupported(scheme.kv, some, target.Options()) else "yes"


def _where(scheme: Scheme) -> str:
    return needs(scheme).partition(":")[0]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows])
