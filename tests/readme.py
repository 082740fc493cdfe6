"""Writes the generated parts of README.md, the map of the code and the support matrix: `make readme`.

The matrix says what can be expressed and planned; what was run and measured is the business of tests and benchmarks.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bridge.describe import architectures, needs, numeric, weights
from bridge.quant.scheme import Scheme, kv_names, load_scheme, scheme_names, with_kv
from bridge.sources.foreign_config.families import parse_family
from bridge.sources.foreign_source import DIALECTS
from bridge.tables.arch import load_roles, parse_arch
from bridge.tables.dialect import Dialect, dialect_names, load_dialect
from bridge.tables.files import TableFile, mappings, own_files, read_table
from bridge.tables.grammar import roles_in
from bridge.targets import Target, load_target, target_names
from bridge.values import Structure

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
MAPPED = ("bridge", "kernels", "examples", "benchmarks", "mappings")
KINDS = {
    "arch": "One architecture each: dims from its config, its Hugging Face spelling of the roles",
    "schemes": "One scheme each: what is quantized to what, and the gates it must pass",
}


def generate(text: str) -> str:
    """`text` with every generated part as it should be today."""
    for name, make in (("map", code_map), ("matrix", matrix)):
        begin, end = f"<!-- {name}: make readme -->", f"<!-- /{name} -->"
        found = re.search(rf"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
        assert found, f"README.md has no {begin} ... {end}"
        text = text[: found.start()] + f"{begin}\n{make()}\n{end}" + text[found.end() :]
    return text


def code_map() -> str:
    """One line a file: what its first line says it is for. Tables and schemes, many and alike, get a line a kind."""
    paths = [p for name in MAPPED for p in sorted((ROOT / name).rglob("*")) if p.suffix in (".py", ".toml", ".j2")]
    paths = [p for p in paths if "__pycache__" not in p.parts and p.parent not in [mappings() / kind for kind in KINDS]]
    lines = [(f"{path.relative_to(ROOT)}", _purpose(path)) for path in paths]
    lines += [(f"mappings/{kind}/*.toml", purpose) for kind, purpose in KINDS.items()]
    return "\n".join(["```text", *(f"{name:<32} {purpose}" for name, purpose in lines), "```"])


def _purpose(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        found = re.match(r"(?:\{#|#)\s*(.+)", text)
        first = found[1].removesuffix("-#}") if found else ""
    first = re.split(r"; |: unfused|\. (?=[A-Z])|\.$", " ".join(first.split()))[0]
    assert first, f"{path} does not say in its first line what it is for"
    return first


def matrix() -> str:
    """Markdown: schemes by target, KV caches by target, architectures that have tables, and dialects by those."""
    targets = [load_target(name) for name in target_names()]
    schemes = [load_scheme(name) for name in scheme_names()]
    kvs = [(name, with_kv(load_scheme("fp8"), name)) for name in kv_names()]
    names = [f"`{target.name}`" for target in targets]
    rows = [[f"`{s.name}`", weights(s), numeric(s.input), _where(s), *(cell(s, t) for t in targets)] for s in schemes]
    kv_rows = [[f"`{name}`", numeric(s.kv), *(_kv_cell(s, t) for t in targets)] for name, s in kvs]
    tables = [[f"`{name}`", ", ".join(f"`{c}`" for c in classes)] for name, classes in architectures().items()]
    parts = [
        _table(["scheme", "weights", "activations", "calibration", *names], rows),
        _table(["`kv`", "codes", *names], kv_rows),
        _table(["table", "architectures"], tables),
        dialects(),
    ]
    return "\n\n".join(parts)


def dialects() -> str:
    """Markdown: what is read from each dialect and written in it, by table, and what it cannot say."""
    known = {name: load_dialect(name) for name in dialect_names()}
    rows, notes = [], {}
    for path in own_files("arch"):
        table = parse_arch(read_table(path), load_roles())
        held = {role for row in table.rows for role in roles_in(row.expr)}
        cells = []
        for name, dialect in known.items():
            here = sorted(set(table.architectures) & dialect.architectures.keys())
            words = {dialect.architectures[found] for found in here}
            told = {role for row in dialect.rows if row.only in ("", *words) for role in row.roles}
            lacking = sorted({dialect.absent[role] for role in (held & dialect.absent.keys()) - told})
            marks = [str(notes.setdefault(why, len(notes) + 1)) for why in lacking] if here else []
            cells.append(" ".join([_said(name, dialect, table.file) if here else "no", *(f"[{m}]" for m in marks)]))
        rows.append([f"`{path.stem}`", *cells])
    whys = [f"[{mark}] Refused where a model has one: {why}." for why, mark in notes.items()]
    return "\n\n".join([_table(["table", *(f"`{name}`" for name in known)], rows), " ".join(whys)])


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


def _kv_cell(scheme: Scheme, target: Target) -> str:
    assert scheme.kv is not None
    some = Structure("any", (), attention=("model.layers.0.self_attn",))
    return "no" if target.refuse_kv(scheme.kv, some, target.Options()) else "yes"


def _where(scheme: Scheme) -> str:
    return needs(scheme).partition(":")[0]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows])


if __name__ == "__main__":
    README.write_text(generate(README.read_text(encoding="utf-8")), encoding="utf-8")
