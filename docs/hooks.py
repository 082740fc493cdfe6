"""Joins the pages and what is made of the code; mkdocs calls these functions while it builds, see its "Hooks".

A page holds `<!-- made: NAME WORDS -->` where something made goes; whole pages are made for schemes and the reference.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # mkdocs loads this file by its path

from mkdocs.structure.files import File, Files

from bridge.quant.scheme import scheme_names
from docs.made import make, pages

MARK = re.compile(r"<!-- made: (?P<words>[^\n]+?) -->")


def on_config(config: Any) -> Any:
    """Put the pages of schemes below their section."""
    (section,) = (entry["Schemes"] for entry in config.nav if "Schemes" in entry)
    section.extend({name: f"schemes/{name}.md"} for name in scheme_names())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made whole."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what is made in the place of its marks."""
    return MARK.sub(lambda found: make(*found["words"].split()), markdown)
