"""Writes the generated parts of README.md and of the pages it links to."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generate import make as make_part
from docs.generate.code_map import folders
from docs.generate.hardware import advice
from docs.generate.stored import filled, linked
from docs.generate.versions import declared

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
PARTS = {"folders": folders, "hardware": advice}


def generate(text: str) -> str:
    """`text` with every generated part as it should be today."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name}: make readme -->", f"<!-- /{name} -->"
        found = re.search(rf"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
        assert found, f"README.md has no {begin} ... {end}"
        text = text[: found.start()] + f"{begin}\n{make()}\n{end}" + text[found.end() :]
    return re.sub(r"^- \[Versions\]\(.*$", lambda _: declared(), text, flags=re.MULTILINE)


if __name__ == "__main__":
    README.write_text(generate(README.read_text(encoding="utf-8")), encoding="utf-8")
    for path in linked():
        text = path.read_text(encoding="utf-8")
        if (made := filled(text, make_part)) != text:
            path.write_text(made, encoding="utf-8")
