"""Run the sweep and keep its results: python -m tests.sweep [--family GLOB] [--kind KIND] [--cell CELL] [--seconds N]

Each cell runs in a process of its own. Results go to tests/sweep/last.json, which the support page is generated from;
cells that did not run keep what they had.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from tests import forks
from tests.sweep.build import KINDS
from tests.sweep.cell import CELLS, ENDS
from tests.sweep.results import LAST, counts, read, write


def main() -> None:
    """Run the cells that are asked for, and print each as it ends."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep")
    parser.add_argument("--family", nargs="*", default=["*"], help="classes of transformers, or patterns of them")
    parser.add_argument("--kind", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--cell", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--end", nargs="*", choices=ENDS, help="only cells that ended so the last time")
    parser.add_argument("--seconds", type=float, default=240, help="a cell may take")
    parser.add_argument("--results", type=Path, default=LAST)
    parser.add_argument("--part", default="0/1", help="N/M: every Mth family, from the Nth on")
    asked = parser.parse_args()
    at, parts = map(int, asked.part.split("/"))
    rows = [(kind, name) for kind in asked.kind for name in KINDS[kind]]
    rows = [(kind, name) for kind, name in rows if any(fnmatch(name, glob) for glob in asked.family)]
    for kind, name in rows[at::parts]:
        last = read(asked.results).get(kind, {}).get(name, {})
        cells = [cell for cell in asked.cell if not asked.end or last.get(cell, {"end": ""})["end"] in asked.end]
        work = Path(tempfile.mkdtemp(prefix="sweep-"))
        for cell in cells:
            ended = one(name, cell, work, asked.seconds)
            print(f"{name:45} {cell:12} {ended['end']:8} {ended['words'][:160]}", flush=True)
            write(asked.results, kind, name, cell, ended)
        shutil.rmtree(work)
    print(counts(read(asked.results)))


def one(name: str, cell: str, work: Path, seconds: float) -> dict[str, str]:
    """How one cell ended, in a fork."""
    code = f"from tests.sweep.cell import main; main({name!r}, {cell!r}, {str(work)!r})"
    status, text = forks.python(code, forks.ROOT, seconds)
    lines = [line for line in text.splitlines() if line.startswith('{"end"')]
    if lines:
        return dict(json.loads(lines[-1]))
    last = (text.strip().splitlines() or [""])[-1]
    return {"end": "crashed", "words": f"the process ended with {status}: {last}"[:300]}


if __name__ == "__main__":
    main()
