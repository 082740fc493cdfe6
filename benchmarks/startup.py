"""Start-up of the command: processor time and wall time of whole processes on the tiny Llama.

    python benchmarks/startup.py                      this tree
    python benchmarks/startup.py --against ../older   in turn with another tree, with the Python of this one

The least of `--rounds` runs: other work on the machine only adds. `python -c pass` and NumPy are what no change of ours
takes away.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "models" / "tiny-llama"
KERNELS = """
import numpy
from bridge._kernels.native import _addresses
for file in ("amax", "cast", "compare", "decode", "fp8", "layout", "scales", "smooth"):
    _addresses(file)
"""


def commands(out: Path) -> dict[str, list[str]]:
    """What is measured, by what it is called."""
    verb = ["-m", "bridge"]
    convert = [*verb, "convert", str(MODEL), "--target", "hf", "--quant", "fp8_pc_pt", "--out", str(out)]
    return {
        "python": ["-c", "pass"],
        "numpy": ["-c", "import numpy"],
        "kernels": ["-c", KERNELS],
        "--help": [*verb, "--help"],
        "convert --help": [*verb, "convert", "--help"],
        "plan": [*verb, "plan", str(MODEL), "--target", "hf", "--quant", "fp8_pc_pt"],
        "convert": convert,
        "convert --no-verify": [*convert, "--no-verify"],
    }


def measured(tree: Path, words: list[str]) -> tuple[float, float]:
    """Processor seconds and wall seconds of one process."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], env={**env, "PYTHONPATH": str(tree)}, cwd=tree, capture_output=True, text=True
    )
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    trees = [ROOT, *([args.against.resolve()] if args.against else [])]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        for what, words in commands(out).items():
            if what == "kernels" and args.against:
                continue  # the other tree may load them in another way
            runs: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in trees}
            for _ in range(args.rounds):
                for tree in trees:
                    shutil.rmtree(out, ignore_errors=True)
                    runs[tree].append(measured(tree, words))
            least = [[min(run[at] for run in runs[tree]) for tree in trees] for at in (0, 1)]
            shown = [" ".join(f"{seconds:6.3f}" for seconds in row) for row in least]
            print(f"{what:20} processor {shown[0]}   wall {shown[1]}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
