"""Puts the generated parts into the pages. mkdocs calls these functions while it builds; see "Hooks" in its manual.

A page has a mark `<!-- generated: NAME WORDS -->` where a generated part goes, and behind it the part itself where
README.md links to the page: see `docs.generate.stored`. Pages of schemes and of the Python
interface are generated whole.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # mkdocs loads this file by its path

from mkdocs.structure.files import File, Files

from docs.generate import make, pages
from docs.generate.schemes import families
from docs.generate.stored import MARK


def on_config(config: Any) -> Any:
    """Add a page for each family of schemes to their section; the pages of schemes are linked from there."""
    (section,) = (entry["Schemes"] for entry in config.nav if "Schemes" in entry)
    section.extend({title: path} for title, path in families())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are generated whole."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks by the generated parts."""
    return MARK.sub(lambda found: make(*found["words"].split()), markdown)
