"""The laws of tests/laws.py find what passes their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.laws import code_lines, problems

TEXT = '''"""What it is for."""

from a import b

# a comment
def f(self, a, b, *, c):
    """Say it.

    In two lines.
    """
    return """
text
"""
'''
BUDGET: dict[str, Any] = {
    "lines": {"bridge": 26, "code": 8, "bridge/core": 13, "bridge/api": 13},
    "parameters": {"most": 3, "excepted": {}},
    "entries": {"most": 2, "excepted": []},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("core", "api"):
        (tmp_path / "bridge" / folder).mkdir(parents=True)
        (tmp_path / "bridge" / folder / "a.py").write_text(TEXT)
        (tmp_path / "bridge" / folder / "__init__.py").touch()
    return tmp_path


def test_lines_of_code_are_without_blanks_docstrings_imports_and_comments() -> None:
    assert code_lines(TEXT) == 4


def test_a_tree_within_its_budget_has_no_problem(root: Path) -> None:
    assert problems(root, BUDGET) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"lines": BUDGET["lines"] | {"bridge/core": 12}}, "bridge/core has 13 lines, 1 above"),
        ({"lines": BUDGET["lines"] | {"code": 7}}, "code has 8 lines, 1 above"),
        ({"lines": {"bridge": 26, "code": 8, "bridge/core": 13}}, "bridge/api has 13 lines and no budget"),
        ({"parameters": {"most": 2, "excepted": {"bridge/api/a.py:f": "-"}}}, "bridge/core/a.py:f has 3 parameters"),
        ({"parameters": {"most": 3, "excepted": {"bridge/api/a.py:f": "-"}}}, "bridge/api/a.py:f is excepted and has"),
        ({"entries": {"most": 1, "excepted": []}}, "bridge has 2 entries"),
    ],
)
def test_each_law_names_what_breaks_it(root: Path, changed: dict[str, Any], problem: str) -> None:
    (found,) = problems(root, BUDGET | changed)
    assert found.startswith(problem)
