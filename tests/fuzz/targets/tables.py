"""Tables of architectures and dialects, as third parties add them, against `tomllib`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.mappings import mappings
from bridge.tables.architectures.arch import ArchTable, parse_arch
from bridge.tables.architectures.roles import load_roles
from bridge.tables.dialects.dialect import Dialect, parse_dialect
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import encoded, one_file, texts

FILE = "llama.toml"
DIALECT = "meta.toml"
WORDS = (
    "attn.q.weight",
    "attn.k.weight",
    "concat(",
    "interleave(",
    "transpose(",
    "rope(",
    "stack(",
    "pad(",
    "shift(",
    "heads=",
    "groups=kv_heads",
    "[rows]",
    "[dims]",
    "[config]",
    "[[rows]]",
    "[ignore]",
    "[first]",
    "{e}",
    '"""',
    "'''",
    "= 1",
    '= "a"',
    "= []",
    "= {}",
    "a.b.c = 1",
    "9" * 50,
    "**",
    "lambda: 0",
    "()" * 50,
    "(" * 200,
    "-" * 3000 + "1",
    "not " * 500,
    "1+" * 3000,
    "[" * 500,
    "a=[" * 3,
    "range(",
    "sliding(",
    "len(",
    "if ",
    "__import__('os')",
    "x.__class__",
    "[x for x in y]",
    "0x10",
    "1e3",
)


def make(root: Path) -> None:
    (root / FILE).write_bytes((mappings() / "arch" / "llama.toml").read_bytes())
    (root / DIALECT).write_bytes((mappings() / "dialects" / "meta.toml").read_bytes())


def cases(root: Path) -> SearchStrategy[Case]:
    return st.one_of(
        *(encoded(texts((root / name).read_text(), WORDS)).map(one_file(name)) for name in (FILE, DIALECT))
    )


def read(root: Path) -> tuple[ArchTable, Dialect]:
    table, dialect = (read_stranger(root / name) for name in (FILE, DIALECT))
    roles = load_roles()
    return parse_arch(table, roles), parse_dialect(dialect, roles)


def read_stranger(path: Path) -> Any:
    from bridge.core.mappings import read_table

    return read_table(path)


def agree(root: Path, found: tuple[ArchTable, Dialect]) -> None:
    table, dialect = found
    for name, file in ((FILE, table.file), (DIALECT, dialect.file)):
        assert file.data == tomllib.loads((root / name).read_text(encoding="utf-8"))
    data = table.file.data
    rows = {key: text for key, text in data.get("rows", {}).items()}
    assert {row.name: _bare(str(row.expr)) for row in table.rows if not row.when and not row.only} == {
        key: _bare(text) for key, text in rows.items()
    }


def _bare(text: str) -> str:
    return "".join(text.split())


TARGET = Target("tables", make, cases, read, agree, FILE)
