"""The first line of every module says what it is for, in few words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bridge

FOLDER = Path(bridge.__file__).parent
MAX_WORDS = 12  # CONTRIBUTING.md


@pytest.mark.parametrize("name", sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*.py")))
def test_the_first_line_of_a_module_has_at_most_twelve_words(name: str) -> None:
    text = ast.get_docstring(ast.parse((FOLDER / name).read_text(encoding="utf-8"))) or ""
    assert 1 <= len(text.partition("\n")[0].split()) <= MAX_WORDS
