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

# Asked of one process: importing diffusers and ModelOpt takes as long as the cases do.
USUAL = (
    "export:flux:fp8", "export:dit:nvfp4:300KB", "export:sdxl:int8_wo", "loaded:flux:fp8_pc_pt", "loaded:sd3:nvfp4",
    "memory:dit", "pipeline:dit", "pipeline:sd", "prompts:sd", "prompts:dit", "graph:flux:none", "graph:dit:fp8",
)  # fmt: skip


def of_kind(kind: str) -> list[str]:
    """The usual cases of a kind."""
    return [case for case in USUAL if case.startswith(f"{kind}:")]


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
