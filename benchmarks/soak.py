"""Two hundred conversions in one process, failing ones among them: memory, open files, threads and temporary files.

    python benchmarks/soak.py

After each conversion the process is measured; the medians of the second and of the last quarter must agree: a first
quarter still fills caches, and holds each kind. The exit code is 1 where something grew. Memory may grow by 16 MiB,
since glibc's arenas and torch's caches settle late: a leak of 160 kB a conversion, a fortieth of the model's weights,
is more than that. What Python holds may grow by 5,000 objects: a graph that stays behind has three times as many.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "examples" / "models"
COUNT = 200
SLACK = {"memory": 16 << 20, "objects": 5000, "files": 0, "threads": 0, "temporary": 0}


@dataclass(frozen=True)
class Measured:
    """One look at the process: resident bytes, what Python's collector holds, open files, threads, temporary files."""

    memory: int
    objects: int
    files: int
    threads: int
    temporary: int


def measured() -> Measured:
    """Look at this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts = [len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task")]
    temporary = len(list(Path(tempfile.gettempdir()).iterdir()))
    objects = len(gc.get_objects()) + gc.get_freeze_count()
    return Measured(pages * os.sysconf("SC_PAGESIZE"), objects, *counts, temporary)


def grown(looks: list[Measured]) -> dict[str, tuple[float, float]]:
    """What is more in the last quarter than in the second: its medians there and here."""
    quarter = len(looks) // 4
    found = {}
    for what, slack in SLACK.items():
        second, last = (
            statistics.median(getattr(look, what) for look in part)
            for part in (looks[quarter : 2 * quarter], looks[-quarter:])
        )
        if last > second + slack:
            found[what] = (second, last)
    return found


Run = Callable[[Path], object]


def conversions(work: Path) -> dict[str, Run]:
    """One of each kind by name, each into the folder that it is given; those called "fails" must raise.

    The first ten are those that few conversions go through.
    """
    import bridge

    llama, gpt2 = MODELS / "tiny-llama", MODELS / "tiny-gpt2"
    saved = bridge.calibrate(llama, "fp8", samples=8, sequence=64).save(work / "fp8.safetensors")
    loaded = _in_memory(llama)

    def convert(model: Any, target: str, quant: str | None, **more: Any) -> Run:
        return lambda out: bridge.convert(model, target, quant, out, **more)

    return {
        "hf int8_wo": convert(llama, "hf", "int8_wo", shard_size="300KB"),
        "hf fp8, calibration given": convert(llama, "hf", "fp8", calib=saved),
        "trtllm int8_wo, two ranks": convert(llama, "trtllm", "int8_wo", tp=2),
        "trt int8_wo, unverified": convert(llama, "trt", "int8_wo", verify=False),
        "tripy int8_wo": convert(gpt2, "tripy", "int8_wo", dtype="fp16"),
        "megatron": convert(llama, "megatron", None),
        "torchtitan": convert(llama, "torchtitan", None),
        "golden": lambda out: _golden(llama, out),
        "fails: disk full": lambda out: _full(convert(llama, "hf", "int8_wo"), out),
        "fails: interrupted": convert(llama, "hf", "int8_wo", progress=_interrupt),
        "hf nvfp4_wo, unverified": convert(llama, "hf", "nvfp4_wo", verify=False),
        "hf fp8, calibrated": convert(llama, "hf", "fp8"),
        "hf int8_wo, compressed-tensors": convert(llama, "hf", "int8_wo", format="compressed-tensors"),
        "hf int8_wo, in memory": convert(loaded, "hf", "int8_wo"),
        "fails: unknown scheme": convert(llama, "hf", "fp7"),
        "fails: not a model": convert(work, "hf", "int8_wo"),
    }


def _in_memory(directory: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory)


def _golden(model: Path, out: Path) -> None:
    import bridge

    bridge.convert(model, "hf", "int4_wo", out / "model", verify=False)
    bridge.golden.record(out / "model", out / "golden", run=False)
    assert bridge.golden.check(out / "golden", model=model).passed


def _full(run: Run, out: Path) -> None:
    real = os.posix_fallocate

    def full(fd: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.posix_fallocate = full
    try:
        run(out)
    finally:
        os.posix_fallocate = real


def _interrupt(done: int, total: int, text: str) -> None:
    raise KeyboardInterrupt


@contextmanager
def failing(name: str) -> Iterator[None]:
    """Hold a conversion to what its name says."""
    import bridge

    fails = False
    try:
        yield
    except (bridge.BridgeError, KeyboardInterrupt):
        fails = True
        if not name.startswith("fails"):
            raise
    assert fails == name.startswith("fails"), f"{name}: did not"


def soak(work: Path, count: int) -> list[Measured]:
    """Convert `count` times, each kind in turn; no more kinds than a quarter holds."""
    kinds = list(conversions(work).items())[: count // 4]
    looks = []
    for number in range(count):
        name, run = kinds[number % len(kinds)]
        out = work / "out"
        with failing(name):
            run(out)
        shutil.rmtree(out, ignore_errors=True)
        looks.append(measured())
        if number + 1 == count // 4:
            gc.freeze()  # or every look goes through a million objects of what is imported by now
    return looks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--json", action="store_true", help="print every look at the process")
    given = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        (Path(folder) / "tmp").mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(Path(folder) / "tmp")
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        looks = soak(Path(folder), given.count)
        left = sorted(path.name for path in Path(folder).iterdir() if path.name not in ("tmp", "cache"))
    tempfile.tempdir = None
    if given.json:
        print(json.dumps([asdict(look) for look in looks]))
        return bool(grown(looks))
    quarter = given.count // 4
    print(f"{given.count} conversions in {time.perf_counter() - start:.0f} s; left beside them: {', '.join(left)}")
    print(f"{'median of the':<14} {'memory':>10} {'objects':>9} {'files':>6} {'threads':>8} {'temporary':>10}")
    for name, part in (("second quarter", looks[quarter : 2 * quarter]), ("last quarter", looks[-quarter:])):
        memory, *rest = (statistics.median(getattr(look, what) for look in part) for what in asdict(looks[0]))
        print(f"{name:<14} {memory / 2**20:>7.1f}MiB {rest[0]:>9.0f} {rest[1]:>6.0f} {rest[2]:>8.0f} {rest[3]:>10.0f}")
    for what, (before, after) in grown(looks).items():
        print(f"GREW: {what} from {before:g} to {after:g}")
    return bool(grown(looks))


if __name__ == "__main__":
    sys.exit(main())
