"""What a test run makes once and all its workers share. Must never hold what a test changes."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

VARIABLE = "BRIDGE_TESTS_SHARED"  # for processes that a run starts
# set by tests/conftest.py for the run
ROOT: Path | None = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def directory(name: str, make: Callable[[Path], object]) -> Path:
    """The directory that `make` fills, made by the worker that comes first; the others wait for it.

    It is seen only when it is whole: `make` fills another one, which is then renamed.
    """
    assert ROOT, "outside of a test run"
    at = ROOT / re.sub(r"[^\w.-]", "_", name)
    if not at.exists():
        with FileLock(f"{at}.lock"):
            if not at.exists():
                part = at.with_name(f".{at.name}.{os.getpid()}")
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                make(part)
                part.rename(at)
    return at


def value(name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, pickled: every caller has a copy of its own."""

    def pickled(part: Path) -> None:
        (part / "value.pickle").write_bytes(pickle.dumps(make()))

    return pickle.loads((directory(name, pickled) / "value.pickle").read_bytes())
