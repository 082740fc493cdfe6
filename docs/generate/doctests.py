"""Shows the examples of docstrings as code: Markdown would take `>>>` for three quotations within each other."""

from __future__ import annotations

from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

PROMPT, FENCE = ">>> ", "```"


class Fenced(Preprocessor):
    """Puts a fence around each paragraph that begins with a prompt, outside of fences that are there."""

    def run(self, lines: list[str]) -> list[str]:
        made: list[str] = []
        fenced = example = False
        for line in lines:
            fenced ^= line.lstrip().startswith(FENCE)
            if example and not line.strip():
                made.append(FENCE)
                example = False
            elif not example and not fenced and line.startswith(PROMPT):
                made.append(f"{FENCE}pycon")
                example = True
            made.append(line)
        return [*made, FENCE] if example else made


class Doctests(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Fenced(md), "doctests", 40)  # before those that take fences out, at 25


def makeExtension(**given: Any) -> Extension:
    """What Markdown calls by the name of this module."""
    return Doctests(**given)
