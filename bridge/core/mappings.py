"""Find and read the TOML files of `mappings/`.

Messages have their line numbers. A third party adds files through the entry point group `bridge.mappings`: a package or
a module whose directory has a folder of `KINDS` with TOML files. Nothing of it is run. Our names come
first; listing all files reports a name that occurs twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bridge.core.entry_points import registered
from bridge.core.errors import TableError
from bridge.core.parsing.file_cache import cached_by_file, copy_parsed
from bridge.core.parsing.limited import parse_toml
from bridge.core.text import nearest

KINDS = ("arch", "composites", "dialects", "schemes", "rules", "runtimes")
_HEADER = re.compile(r"\s*\[([^\[].*)\]\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|([^"'=]+?))\s*=""")


def mappings() -> Path:
    """Return the directory of the tables: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_mappings"
    return inside if inside.is_dir() else package.parent / "mappings"


def table_files(kind: str) -> list[Path]:
    """Return every file of one of `KINDS`, by name; TableError if two have the same name."""
    files: dict[str, Path] = {}
    for path in (*own_files(kind), *added_files(kind)):
        first = files.setdefault(path.stem, path)
        if first is not path:
            raise TableError(f"{path}: {kind} {path.stem!r} is {shown(first)} already; rename one of the two")
    return [files[name] for name in sorted(files)]


def find_table_file(kind: str, name: str) -> Path | None:
    """Return the file of that name, ours before others; None without one."""
    # looked up in the list, never joined to a path: the name comes from a recipe and may not be a file name
    own = next((path for path in own_files(kind) if path.stem == name), None)
    return own or next((path for path in table_files(kind) if path.stem == name), None)


def own_files(kind: str) -> list[Path]:
    """Return the files of this package, sorted."""
    return sorted((mappings() / kind).glob("*.toml"))


def added_files(kind: str) -> Iterator[Path]:
    """Yield the files of third parties by their entry points, which are looked up with the first file."""
    for directory in _added():
        yield from sorted((directory / kind).glob("*.toml"))


@cache
def _added() -> tuple[Path, ...]:
    """Return the directories of third parties."""
    directories: list[Path] = []
    for point in registered("bridge.mappings"):
        where = f"entry point {point.name} = {point.value!r} of bridge.mappings"
        try:
            spec = find_spec(point.value)
        except (ImportError, ValueError) as error:
            raise TableError(f"{where}: {error}") from error
        if spec is None:
            raise TableError(f"{where}: no module of that name is installed")
        places = [*map(Path, spec.submodule_search_locations or ())] or [Path(spec.origin or "").parent]
        if not any((place / kind).is_dir() for place in places for kind in KINDS):
            raise TableError(f"{where}: {', '.join(map(str, places))} holds none of {', '.join(KINDS)}")
        directories += places
    return tuple(directories)


@dataclass(frozen=True)
class Place:
    """The place of a row, for messages: file, line and the row as written."""

    file: str
    line: int
    row: str

    def error(self, what: str, *, inputs: Iterable[str] = (), hint: str = "") -> TableError:
        """Return a TableError about this row."""
        lines = [f"{self.file}:{self.line}: {what}", f"  row    {self.row}"]
        lines += [f"  input  {text}" for text in inputs]
        return TableError("\n".join([*lines, *([f"  hint   {hint}"] if hint else [])]))


@dataclass(frozen=True)
class TableFile:
    """One TOML file: its name for messages, text, data, and the line of every header and key."""

    name: str
    text: str
    data: dict[str, Any]
    lines: Mapping[tuple[str, str], int]

    def place(self, section: str, key: str) -> Place:
        """Return the place of `key` under the header of `section` ("" before the first header)."""
        number = self.lines.get((_unquoted(section), key))
        return Place(self.name, number or 1, self.text.splitlines()[number - 1].strip() if number else key)

    def header(self, section: str) -> Place:
        """Return the place of the header of `section`."""
        return Place(self.name, self.lines.get((_unquoted(section), ""), 1), f"[{section}]")

    def known_keys(self, known: Iterable[str]) -> None:
        """TableError for a top-level key that is not in `known`."""
        for key in self.data:
            if key not in (names := set(known)):
                raise self.place("", key).error(f"unknown key `{key}`", hint=nearest(key, names))

    def section(self, name: str) -> dict[str, Any]:
        """Return a section by its header; empty if absent. TableError if it is not a section."""
        section: Any = self.data
        for word in name.split("."):
            section = section.get(word, {})
            if not isinstance(section, dict):
                raise self.place("", word).error(f"`{name}` is a section", hint=f"[{name}]")
        return dict(section)

    def texts(self, name: str) -> dict[str, str]:
        """Return a section whose values are strings."""
        section = self.section(name)
        for key, value in section.items():
            if not isinstance(value, str):
                raise self.place(name, key).error(f"a value of [{name}] is a string, not {value!r}")
        return section

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of strings before the first header; empty if absent."""
        words = self.data.get(key, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise self.place("", key).error(f"`{key}` is a list of strings", hint=f'{key} = ["..."]')
        return tuple(words)


def read_table(path: Path) -> TableFile:
    """Read one file of `mappings/`, or of a third party's; parsed once while it does not change."""
    file = _parsed(path)
    return replace(file, data=copy_parsed(file.data))


@cached_by_file
def _parsed(path: Path) -> TableFile:
    return parse_table(table_text(path), shown(path))


@cached_by_file
def table_text(path: Path) -> str:
    """Return the text of a table; TableError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{shown(path)}: cannot be read: {error}") from error


def shown(path: Path) -> str:
    """Return a file's name for messages: ours without the installation directory."""
    own = path.is_relative_to(mappings())
    return f"mappings/{path.relative_to(mappings()).as_posix()}" if own else str(path)


def parse_table(text: str, name: str) -> TableFile:
    """Parse the text of a table; a duplicate row is a TOML error and becomes a TableError."""
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise TableError(f"{name}: not valid TOML (duplicate rows are not valid either): {error}") from error
    lines: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = _unquoted(header[1])
            lines[section, ""] = number
        elif key := _KEY.match(line):
            lines[section, key[key.lastindex or 0]] = number
    return TableFile(name, text, data, MappingProxyType(lines))


def _unquoted(header: str) -> str:
    return header.replace('"', "").replace("'", "").replace(" ", "")
