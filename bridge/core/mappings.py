"""Finds and reads the TOML files of `mappings/`, and knows the line of a row; must never interpret a row.

A third party adds files through the entry point group `bridge.mappings`: a package, or a module, in whose directory lie
`arch/*.toml`, `dialects/*.toml` or `schemes/*.toml`. Nothing of it is run. Names of ours come first; whoever lists all
of them is told of a name that stands twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bridge.errors import TableError, nearest
from bridge.toml_data import parse_toml

KINDS = ("arch", "dialects", "schemes")
_HEADER = re.compile(r"\s*\[([^\[].*)\]\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|([^"'=]+?))\s*=""")


def mappings() -> Path:
    """Return the directory of the tables: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_mappings"
    return inside if inside.is_dir() else package.parent / "mappings"


def table_files(kind: str) -> list[Path]:
    """Return every file of `arch`, `dialects` or `schemes`, by name; TableError where two have one name."""
    found: dict[str, Path] = {}
    for path in (*own_files(kind), *added_files(kind)):
        if path.stem in found:
            raise TableError(
                f"{path}: {kind} {path.stem!r} is {shown(found[path.stem])} already; rename one of the two"
            )
        found[path.stem] = path
    return [found[name] for name in sorted(found)]


def find_table_file(kind: str, name: str) -> Path | None:
    """Return the file of that name, ours before others; None where there is none."""
    # looked up in the list, never joined to a path: a recipe says the name, and it may be no name of a file
    own = next((path for path in own_files(kind) if path.stem == name), None)
    return own or next((path for path in table_files(kind) if path.stem == name), None)


def own_files(kind: str) -> list[Path]:
    """Return the files that ship, sorted."""
    return sorted((mappings() / kind).glob("*.toml"))


def added_files(kind: str) -> Iterator[Path]:
    """Yield the files of third parties by their entry points; looks for none before the first is asked for."""
    for directory in _added():
        yield from sorted((directory / kind).glob("*.toml"))


@cache
def _added() -> tuple[Path, ...]:
    """Directories of third parties: looked up once, since that reads the metadata of every installed package (8 ms)."""
    found: list[Path] = []
    for point in sorted(entry_points(group="bridge.mappings"), key=lambda point: point.name):
        said = f"entry point {point.name} = {point.value!r} of bridge.mappings"
        try:
            spec = find_spec(point.value)
        except (ImportError, ValueError) as error:
            raise TableError(f"{said}: {error}") from error
        if spec is None:
            raise TableError(f"{said}: no module of that name is installed")
        places = [*map(Path, spec.submodule_search_locations or ())] or [Path(spec.origin or "").parent]
        if not any((place / kind).is_dir() for place in places for kind in KINDS):
            raise TableError(f"{said}: {', '.join(map(str, places))} holds none of {', '.join(KINDS)}")
        found += places
    return tuple(found)


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

    def section(self, name: str) -> dict[str, Any]:
        """Return a section, named as its header is; empty where there is none. TableError where it is no section."""
        found: Any = self.data
        for word in name.split("."):
            found = found.get(word, {})
            if not isinstance(found, dict):
                raise self.place("", word).error(f"`{name}` is a section", hint=f"[{name}]")
        return dict(found)

    def texts(self, name: str) -> dict[str, str]:
        """Return a section whose values are strings."""
        found = self.section(name)
        for key, value in found.items():
            if not isinstance(value, str):
                raise self.place(name, key).error(f"a value of [{name}] is a string, not {value!r}")
        return found

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of strings that stands before the first header; empty where there is none."""
        found = self.data.get(key, [])
        if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
            raise self.place("", key).error(f"`{key}` is a list of strings", hint=f'{key} = ["..."]')
        return tuple(found)


def read_table(path: Path) -> TableFile:
    """Read one file of `mappings/`, or of a third party's."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{shown(path)}: cannot be read: {error}") from error
    return parse_table(text, shown(path))


def shown(path: Path) -> str:
    """Return what messages call a file: ours without the directory where it is installed."""
    own = path.is_relative_to(mappings())
    return f"mappings/{path.relative_to(mappings()).as_posix()}" if own else str(path)


def parse_table(text: str, name: str) -> TableFile:
    """Parse the text of a table; a duplicate row is a parse error of TOML and becomes a TableError."""
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise TableError(f"{name}: not valid TOML (a row that stands twice is not, either): {error}") from error
    lines: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = _unquoted(header[1])
            lines[section, ""] = number
        elif key := _KEY.match(line):
            lines[section, key[key.lastindex or 0]] = number
    return TableFile(name, text, data, lines)


def _unquoted(header: str) -> str:
    return header.replace('"', "").replace("'", "").replace(" ", "")
