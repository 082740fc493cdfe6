"""The rows that `make test` leaves out: each entry is of a test that is there, and keeps the rows that it says."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests import rows
from tests.kept_graphs import ROOT


@pytest.mark.parametrize("function", rows.read())
def test_an_entry_names_a_test(function: str) -> None:
    path, _, name = function.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
    entry = rows.read()[function]
    assert {"every"} <= entry.keys() <= {"every", "leave", "keep"} and entry["every"] >= 0


def item(nodeid: str, marks: set[str]) -> Any:
    made: Any = SimpleNamespace(nodeid=nodeid, marks=marks)
    made.get_closest_marker = lambda name: name in made.marks or None
    made.add_marker = lambda mark: made.marks.add(mark.name)
    return made


def test_rows_between_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rows, "read", lambda: {"a.py::f": {"every": 2, "keep": ["3"], "leave": ["2"]}, "a.py::g": {"every": 0}}
    )
    names = ["a.py::f[0]", "a.py::f[1]", "a.py::f[x]", "a.py::f[2]", "a.py::f[3]", "a.py::f[4]", "a.py::g", "a.py::h"]
    items = [item(name, {"product"} if "[x]" in name else set()) for name in names]
    rows.mark(items)
    assert [one.nodeid for one in items if not one.marks] == ["a.py::f[0]", "a.py::f[3]", "a.py::f[4]", "a.py::h"]
