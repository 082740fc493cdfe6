"""The parts of the documentation that are made of the code and its tables: nothing is said twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from docs.made import api, command_line, errors, limits, matrix, schemes, targets

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"


def readme(*words: str) -> str:
    """A section of README.md by its title, without the title."""
    title = " ".join(words)
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README.read_text(encoding="utf-8"), re.DOTALL | re.M
    )
    assert found, f"README.md has no section {title!r}"
    return re.sub(r"<!-- [^\n]* -->\n", "", found[1]).strip()


def file(path: str) -> str:
    """A file of the repository, as a code block under its name."""
    text = (ROOT / path).read_text(encoding="utf-8").strip()
    return f'```{Path(path).suffix[1:]} title="{path}"\n{text}\n```'


# What a mark in a page names: see docs/hooks.py.
MADE: dict[str, Callable[..., str]] = {
    "readme": readme,
    "schemes": matrix.schemes,
    "caches": matrix.caches,
    "tables": matrix.tables,
    "dialects": matrix.dialects,
    "options": targets.options,
    "takes": targets.takes,
    "programs": targets.programs,
    "written": targets.written,
    "errors": errors.catalogue,
    "file": file,
    "limits": limits.limits,
    "command-line": command_line.reference,
}


def make(name: str, *words: str) -> str:
    """What `<!-- made: name words -->` stands for."""
    assert name in MADE, f"nothing is made under the name {name!r}; known: {', '.join(MADE)}"
    return MADE[name](*words)


def pages() -> dict[str, str]:
    """Path below the pages -> Markdown, of the pages that are made whole."""
    return schemes.pages() | api.pages()
