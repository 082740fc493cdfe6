"""Reads malicious files in one cage: `python -m tests.fuzz.corpus`, `--whole` for the long ones in every place, too;
prints JSON, name -> what was wrong.

The files are made here, one after the other, and none of them is kept.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from itertools import chain
from pathlib import Path

from bridge.core.errors import BridgeError
from tests.fuzz.cage import Cage
from tests.fuzz.case import clean
from tests.fuzz.corpus import archives, pickles, texts
from tests.fuzz.corpus.entry import Entry


def main() -> None:
    every = list(chain(pickles.entries("--whole" in sys.argv), archives.entries(), texts.entries()))
    with tempfile.TemporaryDirectory() as work:
        for entry in every[::40]:  # what is imported for the first time is not the file's doing
            _read(entry, Path(work, "model"), Path(work, "canary"), None)
        cage = Cage()
        found = {entry.name: _read(entry, Path(work, "model"), Path(work, "canary"), cage) for entry in every}
    wrong = {name: why for name, why in found.items() if why}
    print(json.dumps({"entries": len(every), "wrong": wrong}))
    sys.exit(bool(wrong))


def _read(entry: Entry, root: Path, canary: Path, cage: Cage | None) -> str:
    """Read one; say what was wrong with how it went, "" where nothing was."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    size = 0
    for name, content in entry.files(canary).items():
        (root / name).write_bytes(content)
        size += len(content)
    try:
        if cage is None:
            entry.read(root)
        else:
            with cage.holds(size):
                entry.read(root)
    except BridgeError as error:
        return _judged(error, root)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    if canary.exists():
        return "ran"
    return "was read" if entry.refused else ""


def _judged(error: BridgeError, root: Path) -> str:
    try:
        clean(error, root)
    except AssertionError as wrong:
        return str(wrong)[:300]
    return ""


if __name__ == "__main__":
    main()
