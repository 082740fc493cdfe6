"""Attacks every target and states how many cases were survived: `python -m tests.fuzz --cases 100000 --seed 7`.

A process a target, and as many at once as there are cores; without `--seed` a new one is taken, and printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.fuzz.targets import NAMES, shares

CI = 1_000
LIMIT = 3600 * 3  # seconds for a process: the cage ends what hangs long before


def attacked(name: str, cases: int, seed: int, *more: str) -> dict[str, Any]:
    """Attack one target in a process of its own; `failures` is empty where it survived."""
    command = [sys.executable, "-m", "tests.fuzz.worker", name, str(cases), str(seed), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    lines = done.stdout.splitlines()
    if lines and lines[-1].startswith("{"):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    what = f"{name}: the process ended with {done.returncode}\n{done.stderr[-4000:]}"
    return {"target": name, "cases": 0, "failures": [what]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CI, help="of all targets together")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--target", action="append", choices=NAMES, help="only this one; may be given again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    counts = shares(asked.cases, asked.target or NAMES)
    print(f"seed {seed}: {sum(counts.values())} cases at least, on {len(counts)} targets", flush=True)
    total = failed = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for found in pool.map(lambda name: attacked(name, counts[name], seed), counts):
            total += found["cases"]
            failed += bool(found["failures"])
            print("\n".join([_line(found), *found["failures"]]), flush=True)
    print(f"{total} cases, {failed} of {len(counts)} targets failed (--seed {seed})")
    sys.exit(bool(failed))


def _line(found: dict[str, Any]) -> str:
    counts = f"{found.get('read', 0):>7} read {found.get('refused', 0):>7} refused"
    cost = f"{found.get('seconds', 0):>7} s {found.get('peak', 0) >> 20:>5} MB at most"
    return f"{found['target']:<14} {found['cases']:>7} cases {counts} {cost}{'  FAILED' if found['failures'] else ''}"


if __name__ == "__main__":
    main()
