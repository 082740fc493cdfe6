"""Puts the generated parts into the pages. mkdocs calls these functions while it builds; see "Hooks" in its manual.

A page has a mark `<!-- generated: NAME WORDS -->` where a generated part goes. Pages of schemes and of the Python
interface are generated whole.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # mkdocs loads this file by its path

from mkdocs.structure.files import File, Files

from bridge.quant.schemes.catalog import scheme_names
from docs.generate import make, pages
from docs.generate.matrix import address

MARK = re.compile(r"<!-- generated: (?P<words>[^\n]+?) -->")


def on_config(config: Any) -> Any:
    """Add the pages of the schemes to their section."""
    (section,) = (entry["Schemes"] for entry in config.nav if "Schemes" in entry)
    section.extend({name: address(name)} for name in scheme_names())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are generated whole."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks by the generated parts."""
    return MARK.sub(lambda found: make(*found["words"].split()), markdown)
