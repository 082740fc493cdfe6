"""Formulas of tables over a config's fields, against Python's own evaluation of the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.errors import PlanError, TableError
from bridge.core.mappings import Place
from bridge.tables.expressions.grammar import parse_formula
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import texts

FILE = "formula.json"
CONFIG = {"a": 6, "b": 2, "none": None, "zero": 0, "kinds": ["x", "y"], "big": 10**9, "word": "x", "flag": True}
SEEDS = (
    "a // b * 3 + 1",
    "none or a",
    "zero or kinds and len(kinds) or b",
    "'x' in kinds and a > b",
    "len(range(a))",
    "not flag or a % b == 0",
    "sliding(a, [b, 1])",
    "range(big)",
    "sliding(big, [1, 1])",
    "-a * -b - 7",
    "[a, b, 3]",
    "(a or b) * 2",
)
WORDS = (
    *CONFIG,
    "+",
    "-",
    "*",
    "//",
    "%",
    "**",
    "==",
    "<",
    "in",
    "not in",
    "and",
    "or",
    "(",
    ")",
    "[",
    "]",
    ",",
    "9" * 60,
    "big * " * 60,
)


def make(root: Path) -> None:
    (root / FILE).write_text(SEEDS[0])


def cases(root: Path) -> SearchStrategy[Case]:
    whole = st.sampled_from(SEEDS).flatmap(lambda seed: texts(seed, WORDS, most=4))
    return whole.map(lambda text: {FILE: text.encode("utf-8", "replace")})


def read(root: Path) -> Any:
    text = (root / FILE).read_text()
    try:
        return parse_formula(text, Place(FILE, 1, text), CONFIG).value(CONFIG)
    except PlanError as error:  # says the formula; whoever evaluates one adds the file
        raise TableError(f"{FILE}: {error}") from error


def agree(root: Path, found: Any) -> None:
    if "sliding" in (text := (root / FILE).read_text()):  # ours alone
        return
    given = {"len": len, "range": lambda count: tuple(range(count)), "__builtins__": {}}
    assert json.dumps(found) == json.dumps(eval(text.strip(), given | CONFIG))


TARGET = Target("formulas", make, cases, read, agree, FILE)
