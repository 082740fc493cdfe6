"""The first line of every module says what it is for, in few words."""

from __future__ import annotations

import ast
from pathlib import Path

import bridge

FOLDER = Path(bridge.__file__).parent
MAX_WORDS = 12  # CONTRIBUTING.md


def test_the_first_line_of_a_module_has_at_most_twelve_words() -> None:
    lines = {path: (_docstring(path).partition("\n")[0]) for path in sorted(FOLDER.rglob("*.py"))}
    wrong = {
        str(path.relative_to(FOLDER)): line for path, line in lines.items() if not 1 <= len(line.split()) <= MAX_WORDS
    }
    assert len(lines) > 500 and wrong == {}


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
