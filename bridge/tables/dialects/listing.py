"""List an architecture's table, alone or next to a dialect's."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.core.errors import UsageError
from bridge.core.mappings import read_table, table_files
from bridge.core.text import nearest
from bridge.tables.architectures.arch import ArchTable, Row, load_arch, parse_arch
from bridge.tables.architectures.composite import Composite, load_composite, parse_composite, rows_here
from bridge.tables.architectures.roles import load_roles
from bridge.tables.dialects.dialect import Dialect
from bridge.tables.expressions.grammar import roles_in


@dataclass(frozen=True)
class Line:
    """One tensor of the architecture, and one of the dialect with (some of) its roles.

    `when`: its condition, or the architectures that have it. `written`: False if the dialect's tensor is only read.
    """

    tensor: str
    roles: str
    when: str
    native: str = ""
    made: str = ""
    written: bool = True


def find_table(name: str) -> ArchTable | None:
    """Return the table of that file or architecture, None if there is none.

    >>> find_table("llama") == find_table("LlamaForCausalLM")
    True
    """
    path = next((path for path in table_files("arch") if path.stem == name), None)
    return parse_arch(read_table(path), load_roles()) if path else load_arch(name)


def lines_of(table: ArchTable) -> list[Line]:
    """One line for each row of an architecture's table, in its order."""
    return [Line(row.name, str(row.expr), _when(row)) for row in table.rows]


def find_composite(name: str) -> Composite | None:
    """Return the table of that file or class with a text model inside, None if there is none."""
    path = next((path for path in table_files("composites") if path.stem == name), None)
    return parse_composite(read_table(path)) if path else load_composite(name)


def composite_lines(composite: Composite) -> list[Line]:
    """One line for each tensor of a tower, then for each row of the text models."""
    lines = [Line(row.name, row.said, "") for row in composite.carried]
    for kind, name in composite.text.items():
        only = "" if len(composite.text) == 1 else f"text_config is {kind}"
        for row in rows_here(composite, name):
            lines.append(Line(row.name, str(row.expr), " and ".join(filter(None, (only, str(row.when or ""))))))
    return lines


def merged(table: ArchTable, dialect: Dialect, name: str, also: bool = False) -> list[Line]:
    """One line for each pair of tensors that share a role; UsageError if the dialect lacks the architecture.

    name: as given by the user.  also: with the names that are only read.
    """
    stem = table.file.name.rpartition("/")[2].removesuffix(".toml")
    listed = [known for known in dialect.architectures if known in table.architectures and name in (known, stem)]
    if not listed:
        raise UsageError(f"{dialect.file.name} has no layout for {name!r}; {nearest(name, dialect.architectures)}")
    architecture = listed[0]
    rows = [row for row in table.rows if row.expr and (not row.only or architecture in row.only)]
    present = frozenset(role for row in rows if row.expr for role in roles_in(row.expr))
    word = dialect.architectures[architecture]
    natives = [row for row in dialect.rows if row.only in ("", word) and present.issuperset(row.roles)]
    if not also:
        natives = [row for row in natives if row.written and present.issuperset(row.needs)]
    lines = []
    for row in rows:
        roles = roles_in(row.expr) if row.expr else ()
        columns = [(n.name, str(n.expr), n.written) for n in natives if {*roles} & {*n.roles}]
        if not columns:
            columns = [("", next(dialect.absent[role] for role in roles if role in dialect.absent), True)]
        lines += [Line(row.name, str(row.expr), _when(row), *cells) for cells in columns]
    return lines


def _when(row: Row) -> str:
    parts = [", ".join(row.only), str(row.when) if row.when else ""]
    return " if ".join(part for part in parts if part)
