"""Finds and reads the TOML files of `mappings/`, and knows the line of a row; must never interpret a row."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.errors import TableError, nearest

_HEADER = re.compile(r"\s*\[([^\[].*)\]\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*["']?([^"'=]+?)["']?\s*=""")


def mappings() -> Path:
    """Return the directory of the tables: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_mappings"
    return inside if inside.is_dir() else package.parent / "mappings"


@dataclass(frozen=True)
class Place:
    """Where a row stands, for messages: file, line and the row as written."""

    file: str
    line: int
    row: str

    def error(self, what: str, *, inputs: Iterable[str] = (), hint: str = "") -> TableError:
        """Return the TableError about this row; nothing is raised here."""
        lines = [f"{self.file}:{self.line}: {what}", f"  row    {self.row}"]
        lines += [f"  input  {text}" for text in inputs]
        return TableError("\n".join([*lines, *([f"  hint   {hint}"] if hint else [])]))


@dataclass(frozen=True)
class TableFile:
    """One TOML file: its name for messages, its text, its data, and the line of every header and key."""

    name: str
    text: str
    data: dict[str, Any]
    lines: dict[tuple[str, str], int]

    def place(self, section: str, key: str) -> Place:
        """Return the place of `key` under the header of `section` ("" before the first header)."""
        number = self.lines.get((_unquoted(section), key))
        return Place(self.name, number or 1, self.text.splitlines()[number - 1].strip() if number else key)

    def header(self, section: str) -> Place:
        """Return the place of the header of `section`."""
        return Place(self.name, self.lines.get((_unquoted(section), ""), 1), f"[{section}]")

    def known_keys(self, known: Iterable[str]) -> None:
        """Raise TableError when a top-level key is none of `known`."""
        for key in self.data:
            if key not in (names := set(known)):
                raise self.place("", key).error(f"unknown key `{key}`", hint=nearest(key, names))


def read_table(path: Path) -> TableFile:
    """Read one file of `mappings/`."""
    return parse_table(path.read_text(encoding="utf-8"), f"mappings/{path.relative_to(mappings()).as_posix()}")


def parse_table(text: str, name: str) -> TableFile:
    """Parse the text of a table; a duplicate row is a parse error of TOML and becomes a TableError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{name}: not valid TOML (a row that stands twice is not, either): {error}") from error
    lines: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = _unquoted(header[1])
            lines[section, ""] = number
        elif key := _KEY.match(line):
            lines[section, key[1]] = number
    return TableFile(name, text, data, lines)


def _unquoted(header: str) -> str:
    return header.replace('"', "").replace("'", "").replace(" ", "")
