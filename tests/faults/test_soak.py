"""Conversions in one process leave memory, objects, open files, threads and temporary files as they were.

Forty here, by `make test-all`, four of each of ten kinds; `python benchmarks/soak.py` does two hundred, of all kinds.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import SLACK, Measured, grown

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
FLAT = Measured(memory=1 << 30, objects=400_000, files=9, threads=4, temporary=0)


@pytest.mark.slow
@pytest.mark.product
def test_forty_conversions_in_one_process_stay_flat() -> None:
    done = subprocess.run([sys.executable, SOAK, "--count", "40"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("count", [40, 200])
def test_what_does_not_grow_is_flat(count: int) -> None:
    assert grown([FLAT] * count) == {}
    falling = [dataclasses.replace(FLAT, memory=FLAT.memory - at) for at in range(count)]
    assert grown(falling) == {}


@pytest.mark.parametrize("what", SLACK)
def test_a_leak_of_each_conversion_is_seen(what: str) -> None:
    each = max(SLACK[what] // 90, 1)
    leaking = [dataclasses.replace(FLAT, **{what: getattr(FLAT, what) + at * each}) for at in range(200)]
    assert list(grown(leaking)) == [what]


def test_a_leak_of_one_kind_of_ten_is_seen_in_forty() -> None:
    leaking = [dataclasses.replace(FLAT, objects=FLAT.objects + at // 10 * 16_000) for at in range(40)]
    assert list(grown(leaking)) == ["objects"]
