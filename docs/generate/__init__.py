"""Generates parts of the documentation from the code, the tables and real runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generate import (
    api,
    code_map,
    command_line,
    errors,
    hardware,
    limits,
    matrix,
    quality,
    runtimes,
    schemes,
    speed,
    sweep,
    targets,
    versions,
)

ROOT = Path(__file__).parent.parent.parent


def file(path: str) -> str:
    """A file of the repository, as a code block under its name."""
    text = (ROOT / path).read_text(encoding="utf-8").strip()
    return f'```{Path(path).suffix[1:]} title="{path}"\n{text}\n```'


# What the mark `<!-- generated: NAME WORDS -->` in a page names: see docs/hooks.py.
PARTS: dict[str, Callable[..., str]] = {
    "schemes": matrix.schemes,
    "quality-schemes": quality.schemes,
    "quality-peers": quality.peers,
    "quality-small": quality.small,
    "quality-layouts": quality.layouts,
    "quality-tasks": quality.tasks,
    "quality-reports": quality.reports,
    "picks": quality.picks,
    "speeds": speed.speeds,
    "best": quality.best,
    "caches": matrix.caches,
    "tables": matrix.tables,
    "dialects": matrix.dialects,
    "options": targets.options,
    "takes": targets.takes,
    "tasks": targets.tasks,
    "programs": targets.programs,
    "runtimes": runtimes.schemes,
    "evidence": runtimes.evidence,
    "faults": runtimes.faults,
    "compiled": runtimes.compiled,
    "gpus": hardware.gpus,
    "advice": hardware.advice,
    "written": targets.written,
    "families": sweep.families,
    "refused-families": sweep.reasons,
    "versions": versions.cells,
    "refused-versions": versions.reasons,
    "errors": errors.catalogue,
    "file": file,
    "limits": limits.limits,
    "command-line": command_line.reference,
    "code-map": code_map.code_map,
}


def make(name: str, *words: str) -> str:
    """What `<!-- generated: name words -->` stands for."""
    assert name in PARTS, f"no generator is called {name!r}; known: {', '.join(PARTS)}"
    return PARTS[name](*words)


def pages() -> dict[str, str]:
    """Path below the pages -> Markdown, of the pages that are generated whole."""
    return schemes.pages() | api.pages()
