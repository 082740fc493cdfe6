"""An architecture's table, alone or beside a dialect's, for people to read; must never look at a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.errors import UsageError, nearest
from bridge.tables.arch import ArchTable, Row, arch_files, load_arch, load_roles, parse_arch
from bridge.tables.dialect import Dialect, DialectRow
from bridge.tables.files import read_table
from bridge.tables.grammar import roles_in


@dataclass(frozen=True)
class Line:
    """One tensor of the architecture, and one of the dialect that holds (some of) its roles.

    `when`: the condition or the architectures that have it. `written`: False where the dialect's is another spelling.
    """

    tensor: str
    roles: str
    when: str
    native: str = ""
    made: str = ""
    written: bool = True


def find_table(name: str) -> ArchTable | None:
    """Return the table of that file or architecture, None where there is none.

    >>> find_table("llama") == find_table("LlamaForCausalLM")
    True
    """
    path = next((path for path in arch_files() if path.stem == name), None)
    return parse_arch(read_table(path), load_roles()) if path else load_arch(name)


def lines_of(table: ArchTable) -> list[Line]:
    """A line for each row of an architecture's table, in its order."""
    return [Line(row.name, str(row.expr), _when(row)) for row in table.rows]


def merged(table: ArchTable, dialect: Dialect, name: str, also: bool = False) -> list[Line]:
    """A line for each pair of tensors that hold one role; UsageError where the dialect has no such architecture.

    name: as the user calls it.  also: with the spellings that are only read.
    """
    listed = [
        found for found in dialect.architectures if found in table.architectures and name in (found, *_stem(table))
    ]
    if not listed:
        raise UsageError(f"{dialect.file.name} has no layout for {name!r}; {nearest(name, dialect.architectures)}")
    architecture = listed[0]
    rows = [row for row in table.rows if row.expr and (not row.only or architecture in row.only)]
    held = frozenset(role for row in rows if row.expr for role in roles_in(row.expr))
    word = dialect.architectures[architecture]
    natives = [row for row in dialect.rows if row.only in ("", word) and held.issuperset(row.roles)]
    found = []
    for row in rows:
        fitting = [native for native in natives if _pairs(row, native, held, also)]
        made = [(native.name, str(native.expr), native.written) for native in fitting]
        if not fitting and row.expr:
            made = [("", next(dialect.absent[role] for role in roles_in(row.expr) if role in dialect.absent), True)]
        found += [Line(row.name, str(row.expr), _when(row), *columns) for columns in made]
    return found


def _pairs(row: Row, native: DialectRow, held: frozenset[str], also: bool) -> bool:
    assert row.expr
    written = native.written and held.issuperset(native.needs)
    return (written or also) and bool({*roles_in(row.expr)} & {*native.roles})


def _when(row: Row) -> str:
    parts = [", ".join(row.only), str(row.when) if row.when else ""]
    return " if ".join(part for part in parts if part)


def _stem(table: ArchTable) -> tuple[str]:
    return (table.file.name.rpartition("/")[2].removesuffix(".toml"),)
