"""A batch of small models on two cores, against a shell loop of `qbridge convert`: wall and processor seconds.

    python benchmarks/batch.py [--rounds N] [--keep DIRECTORY]

Twelve rows: two trained models, three targets, a scheme that needs a calibration and one that does not. The loop starts
a process a row and calibrates in each; the batch keeps its workers and calibrates each model once, and starts a cluster
of its own where Ray runs it. The ways take turns, and the medians are told. At the end outputs are compared: all ways
must have written the same weights.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("tiny-llama", "tiny-gpt2")
TARGETS = ("hf", "tripy", "trt")
SCHEMES = ("fp8", "int8_wo")
QBRIDGE = [sys.executable, "-m", "bridge"]
LOOP, ONE, TWO, RAY = "loop", "batch, 1 at once", "batch, 2 at once", "batch on Ray, 2 at once"
WAYS = {ONE: ["--workers", "1"], TWO: ["--workers", "2"], RAY: ["--workers", "2", "--engine", "ray"]}


def manifest(work: Path) -> Path:
    path = work / "batch.toml"
    models = [str(ROOT / "examples/models" / name) for name in MODELS]
    path.write_text(
        f"[[matrix]]\nmodel = {models}\ntarget = {list(TARGETS)}\nquant = {list(SCHEMES)}\n"
        'out = "out/{name}"\n'.replace("'", '"')
    )
    return path


def loop(work: Path) -> None:
    """What a shell script does."""
    for model in MODELS:
        for target in TARGETS:
            for scheme in SCHEMES:
                out = work / "out" / f"{model}-{scheme}-{target}"
                arguments = [
                    str(ROOT / "examples/models" / model),
                    "--target",
                    target,
                    "--quant",
                    scheme,
                    "--out",
                    str(out),
                ]
                subprocess.run([*QBRIDGE, "convert", *arguments, "--quiet"], check=True)


def batch(work: Path, arguments: list[str]) -> None:
    subprocess.run([*QBRIDGE, "batch", str(manifest(work)), *arguments, "--quiet"], check=True)


def timed(work: Path, way: str) -> tuple[float, float]:
    """Wall and processor seconds of one way, from nothing."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    if way == LOOP:
        loop(work)
    else:
        batch(work, WAYS[way])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, spent


def weights(work: Path) -> dict[str, bytes]:
    files = [*work.rglob("*.safetensors"), *work.rglob("*.onnx"), *work.rglob("bridge.json")]
    return {str(path.relative_to(work)): path.read_bytes() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="where to write; default: a temporary directory")
    given = parser.parse_args()
    work = given.keep or Path(tempfile.mkdtemp())
    ways = [LOOP, *(way for way in WAYS if way != RAY or find_spec("ray"))]
    spent: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    try:
        for _ in range(given.rounds):
            for way in ways:
                spent[way].append(timed(work / way, way))
        same = all(weights(work / way) == weights(work / LOOP) for way in ways)
    finally:
        if not given.keep:
            shutil.rmtree(work)
    medians = {way: [statistics.median(column) for column in zip(*runs, strict=True)] for way, runs in spent.items()}
    cores = len(os.sched_getaffinity(0))
    print(
        f"{len(MODELS) * len(TARGETS) * len(SCHEMES)} rows, {cores} cores, median of {given.rounds}; same bytes: {same}"
    )
    for way, (wall, processor) in medians.items():
        ratio = medians[LOOP][0] / wall
        print(f"{way:24}{wall:8.1f} s{processor:8.1f} s of processor   {ratio:5.2f} times the loop's rate")
    print(f"two workers against one: {medians[ONE][0] / medians[TWO][0]:.2f}")
    if not same:
        sys.exit("the ways wrote different bytes")


if __name__ == "__main__":
    main()
