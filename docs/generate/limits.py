"""The limits for untrusted files and servers, from the constants of the readers and their comments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs.generate.matrix import table

ROOT = Path(__file__).parent.parent.parent
READERS = (
    "bridge/core/files",
    "bridge/core/formats",
    "bridge/core/parsing/limited.py",
    "bridge/core/remote",
    "bridge/tables",
    "bridge/sources",
    "bridge/quant/calibration.py",
)
LIMIT = re.compile(r"^(?P<name>MAX_[A-Z_]*) = (?P<value>[^#\n]+?)  # (?P<why>.+)$", re.M)
# Limits of our own work, not of a file: rows per system call, connections that are kept, ranks that a message names.
OURS = (
    ("bridge/core/files/span.py", "MAX_ROWS"),
    ("bridge/core/remote/connections.py", "MAX_OPEN"),
    ("bridge/sources/weights/ranks.py", "MAX_SHOWN"),
)
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def limits() -> str:
    """Every constant of a reader whose name marks it as a limit."""
    return table(["limit", "value", "what is limited, and why {: .wide }"], [list(row) for row in found()])


def found() -> Iterator[tuple[str, str, str]]:
    """(constant with its module, value, comment) in the order of the files."""
    for reader in READERS:
        path = ROOT / reader
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for limit in LIMIT.finditer(file.read_text(encoding="utf-8")):
                where, name, why = str(file.relative_to(ROOT)), limit["name"], limit["why"]
                if (where, name) not in OURS:
                    value = _value(ast.parse(limit["value"].strip(), mode="eval").body)
                    module = where.removeprefix("bridge/").removesuffix(".py").replace("/", ".")
                    yield f"`{module}.{name}`", _said(value, name, why), why


def _value(node: ast.expr) -> int:
    """A number, or one number shifted by another."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):
        return _value(node.left) << _value(node.right)
    assert isinstance(node, ast.Constant) and isinstance(node.value, int), ast.dump(node)
    return node.value


def _said(value: int, name: str, why: str) -> str:
    """A number in words. Names and comments say which are bytes."""
    of_bytes = name.endswith(("_BYTES", "_HEADER")) or why.startswith("bytes")
    for unit, word in UNITS if of_bytes else ():
        if value % unit == 0:
            return f"{value // unit} {word}"
    return f"{value:,}"
