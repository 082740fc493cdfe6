"""What a type checker says about a user's script: nothing about right ones, and where the wrong ones are wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from bridge.api import words
from bridge.cli.target_options import target_options
from bridge.quant.schemes.catalog import best_names, kv_names, scheme_names
from bridge.sources.rotated.opening import ROTATIONS
from bridge.targets import BUILT_IN

ROOT = Path(__file__).parents[2]
WRONG = """
import bridge
report = bridge.convert("model", target="trt", quant="fp8", opsett=21)
plan = bridge.plan("model", target="hf", quant="fp8", tp="two")
"""


def test_the_names_for_type_checkers_are_those_of_the_tables() -> None:
    assert get_args(words.TargetName) == BUILT_IN
    assert list(get_args(words.SchemeName)) == sorted([*scheme_names(), *best_names(), "int4"])
    assert list(get_args(words.KvName)) == kv_names()
    assert set(get_args(words.RotationName)) == set(ROTATIONS)
    assert set(words.TargetOptions.__annotations__) == {
        name for options in target_options().values() for name in options
    }


def checked(folder: Path, **scripts: str) -> str:
    """What mypy says of scripts, all at once: most of its time goes into the package."""
    paths = [folder / f"{name}.py" for name in scripts]
    for path, script in zip(paths, scripts.values(), strict=True):
        path.write_text(script)
    command = [sys.executable, "-m", "mypy", "--strict", *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
@pytest.mark.product  # half a minute
def test_the_quickstart_has_no_type_errors_and_a_wrong_option_has_one(tmp_path: Path) -> None:
    page = (ROOT / "docs/pages/index.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "for outputs in report.parity.outputs" in blocks[0]
    said = checked(tmp_path, right=blocks[0], wrong=WRONG)
    assert re.search(r"wrong\.py:3: error: Unexpected keyword argument .opsett.", said), said
    assert re.search(r"wrong\.py:4: error: Argument .tp. .*incompatible type", said), said
    errors = [line for line in said.splitlines() if ": error:" in line]
    assert all(line.partition(":")[0].endswith("wrong.py") for line in errors), said
    assert "in 1 file (checked 2 source files)" in said, said
