"""Shows the examples of docstrings as code. Markdown would read `>>>` as three nested quotations."""

from __future__ import annotations

from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

PROMPT, FENCE = ">>> ", "```"


class Fenced(Preprocessor):
    """Put a fence around each paragraph that begins with a prompt, outside of existing fences."""

    def run(self, lines: list[str]) -> list[str]:
        lines_out: list[str] = []
        fenced = example = False
        for line in lines:
            fenced ^= line.lstrip().startswith(FENCE)
            if example and not line.strip():
                lines_out.append(FENCE)
                example = False
            elif not example and not fenced and line.startswith(PROMPT):
                lines_out.append(f"{FENCE}pycon")
                example = True
            lines_out.append(line)
        return [*lines_out, FENCE] if example else lines_out


class Doctests(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Fenced(md), "doctests", 40)  # before those that take fences out, at 25


def makeExtension(**given: Any) -> Extension:
    """What Markdown calls by the name of this module."""
    return Doctests(**given)
