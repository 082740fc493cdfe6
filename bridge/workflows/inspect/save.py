"""Write the directory of an inspection."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from bridge.core.errors import WriteError
from bridge.core.output.directory import output_directory
from bridge.workflows.inspect.features.dumps import Dumps
from bridge.workflows.inspect.page import render
from bridge.workflows.inspect.result import MARK, Inspection, Record


def save(inspection: Inspection, out: Path, overwrite: bool = False, dumps: Dumps | None = None) -> None:
    """Write inspect.json, statistics.csv and inspect.html, and move `dumps` there; visible in one rename.

    Raises:
        UsageError: `out` exists and is no inspection, or `overwrite` is not given.
    """
    with output_directory(out, "", overwrite=overwrite, resume=False, mark=MARK) as work:
        page = render(inspection)
        texts = {MARK: f"{inspection.to_json()}\n", "statistics.csv": inspection.to_csv(), "inspect.html": page}
        for name, text in texts.items():
            (work.directory / name).write_text(text, encoding="utf-8")
        if dumps:
            dumps.move(work.directory)


class StepsFile:
    """The records of a loop while it runs, a line each in NAME.steps.jsonl beside the directory; a kill leaves it.

    WriteError if a loop that was killed left one, unless `overwrite`.
    """

    def __init__(self, out: Path, overwrite: bool) -> None:
        self.path = out.absolute().with_name(f"{out.name}.steps.jsonl")
        if self.path.exists() and not overwrite:
            raise WriteError(f"{self.path}: is left from a loop that was killed; move it away, or overwrite=True")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("", encoding="utf-8")

    def add(self, records: Iterable[Record]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(record)) + "\n" for record in records)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
