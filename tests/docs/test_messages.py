"""Sentences of the guide that were read twice are in no message."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Parts of messages that the guide rewrote, and more like them.
AGAIN = (
    "no one of", "fused there, and is not read", "of which one format", "they are of two", "to end sooner",
    "source is zero, and it is not", "other than calibration chose", "first at (", "no journal: not ours",
    "this one was given up", "that were started together, and", "parts are silent", "of which the source has no",
    "is of one scheme", "positions that are compared is among", "outputs of a float32 copy {", "amax differed",
)  # fmt: skip


def texts(path: Path) -> list[str]:
    """Every string of a module but its docstrings; values of f-strings are `{}`."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [
        node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in docs
    ]
    found = []
    for node in strings:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        found.append("".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in parts))
    return found


def test_no_message_has_a_sentence_that_was_read_twice() -> None:
    bad = [
        (path.relative_to(ROOT).as_posix(), text)
        for path in sorted(ROOT.glob("bridge/**/*.py"))
        for text in texts(path)
        if any(words in text for words in AGAIN)
    ]
    assert bad == []


def test_the_guide_shows_each_sentence_before_and_after() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Messages")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!read twice|---)(.+?) \| (.+?) \|$", guide, re.MULTILINE)
    assert len(rows) >= 8 and all(before != after and len(after) < 110 for before, after in rows)
