"""Check and write the directory of an inspection."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError, WriteError, reason
from bridge.core.output.directory import output_directory
from bridge.core.output.replace import check_free
from bridge.core.text import described
from bridge.workflows.inspect.dumps import Dumps
from bridge.workflows.inspect.page import render
from bridge.workflows.inspect.result import MARK, Inspection, Record


def check_arguments(out: Any, sink: Any, feature_dirs: Any) -> None:
    """UsageError for one of another type."""
    if out is not None and not isinstance(out, str | Path):
        raise UsageError(f"out={described(out)} (--out): expected the path of a directory")
    if sink is not None and not callable(sink):
        raise UsageError(f"sink={described(sink)}: expected a function, called as sink(name, value, step)")
    folders = (
        feature_dirs if isinstance(feature_dirs, Sequence) and not isinstance(feature_dirs, str) else [feature_dirs]
    )
    if wrong := [folder for folder in folders if folder is not None and not isinstance(folder, str | Path)]:
        raise UsageError(f"feature_dirs={described(wrong[0])} (--features): expected paths of folders of Python files")


def check_out(out: Path, overwrite: bool) -> None:
    """WriteError if an inspection cannot be written there, before any work."""
    check_free(out, overwrite, MARK)
    parent = out.absolute().parent
    there = next(place for place in (parent, *parent.parents) if os.path.lexists(place))
    try:
        Path(tempfile.mkdtemp(prefix=".", dir=there)).rmdir()
    except OSError as error:
        raise WriteError(
            f"{out}: cannot be written: {there}: {reason(error)}; choose another directory (out=, --out)"
        ) from error


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
