"""Write the directory of an inspection."""

from __future__ import annotations

from pathlib import Path

from bridge.core.output.directory import output_directory
from bridge.workflows.inspect.page import render
from bridge.workflows.inspect.result import MARK, Inspection


def save(inspection: Inspection, out: Path, overwrite: bool = False) -> None:
    """Write inspect.json, statistics.csv and inspect.html, visible in one rename.

    Raises:
        UsageError: `out` exists and is no inspection, or `overwrite` is not given.
    """
    with output_directory(out, "", overwrite=overwrite, resume=False, mark=MARK) as work:
        page = render(inspection)
        texts = {MARK: f"{inspection.to_json()}\n", "statistics.csv": inspection.to_csv(), "inspect.html": page}
        for name, text in texts.items():
            (work.directory / name).write_text(text, encoding="utf-8")
