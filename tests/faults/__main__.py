"""Strikes every command with every kind of fault: `python -m tests.faults --points 200 --seed 7`.

`--points`: of each kind, over all commands together. Without `--seed` a new one is taken, and printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.commands import COMMANDS
from tests.faults.kinds import KINDS, shares, struck_by
from tests.faults.stand import Stand
from tests.faults.struck import built


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200, help="of each kind, over all commands together")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this one; may be given again")
    parser.add_argument("--command", action="append", choices=[c.name for c in COMMANDS], help="as --kind")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    print(f"seed {seed}: {asked.points} points at least of each kind", flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        stand = Stand(built(Path(folder)), Path(folder))
        try:
            failed = sum(_struck(stand, kind, asked.command, asked.points, seed) for kind in asked.kind or KINDS)
        finally:
            stand.close()
    print(f"{failed} failures (--seed {seed})")
    return bool(failed)


def _struck(stand: Stand, kind: str, names: list[str] | None, points: int, seed: int) -> int:
    """Strike the commands with one kind of fault, and print how each bore it; how many things were wrong."""
    failed = 0
    for command in COMMANDS:
        if struck_by(kind, command) and command.name in (names or [command.name]):
            begin, share = time.perf_counter(), shares(points, kind)[command.name]
            wrong = KINDS[kind](command, stand, share, seed)
            line = f"{kind:<14} {command.name:<32} {share:>4} points {time.perf_counter() - begin:>6.1f} s"
            print("\n".join([line + ("  FAILED" if wrong else ""), *wrong]), flush=True)
            failed += len(wrong)
    return failed


if __name__ == "__main__":
    sys.exit(main())
