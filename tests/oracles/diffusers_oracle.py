"""Run cases of `tests.oracles.diffusers_process` in one process, once for all workers of a test run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import once

HOME = Path(sys.prefix) / "diffusers"
MISSING = "diffusers is not installed here; install it with: make oracles"
needs_diffusers = pytest.mark.skipif(not HOME.is_dir(), reason=MISSING)


def answers(name: str, cases: Sequence[str]) -> dict[str, Any]:
    """The answer to each case; `name` is that of the set of cases."""
    return dict(once.value(f"diffusers {name}", lambda: _asked(cases)))


def _asked(cases: Sequence[str]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.oracles.diffusers_process", folder, *cases]
        run = subprocess.run(command, capture_output=True, text=True)
    assert not run.returncode, run.stderr[-4000:]
    lines = [line.removeprefix("answer ") for line in run.stdout.splitlines() if line.startswith("answer ")]
    return [json.loads(line) for line in lines]
