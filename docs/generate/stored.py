"""Fills the tables of pages that README.md links to, so that they show without the site."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
END = "<!-- /generated -->"
MARK = re.compile(
    rf"<!-- generated: (?P<words>[^\n]+?) -->(?:\n\n(?P<text>(?:(?!<!-- generated)[\s\S])*?)\n\n{re.escape(END)})?"
)
ATTRIBUTES = re.compile(r" ?\{: [^}\n]*\}")  # of the site alone
WHOLE = ("file",)  # copies of a file, which the page names


def linked() -> Iterator[Path]:
    """The pages that README.md links to."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    yield from (ROOT / page for page in sorted({*re.findall(r"\]\((docs/pages/[^)#]+\.md)", text)}))


def filled(text: str, make: Callable[..., str]) -> str:
    """A page with what each mark stands for behind it."""

    def part(found: re.Match[str]) -> str:
        words = found["words"].split()
        begin = f"<!-- generated: {found['words']} -->"
        return begin if words[0] in WHOLE else f"{begin}\n\n{ATTRIBUTES.sub('', make(*words)).strip()}\n\n{END}"

    return MARK.sub(part, text)
