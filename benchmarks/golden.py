"""A golden check of a 2.2 GB model against reading its bytes once, in turn, in one process: time and memory.

    python benchmarks/golden.py

The files lie in the page cache; from a disk both sides would run at its rate. "read" is a plain loop of one thread over
the files, what `cat FILES > /dev/null` does, "read, threads" the same pieces on as many threads as the check has. The
golden is recorded without a run, and nothing has moved, so nothing is run.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoint import SMALL, make_checkpoint
from xxhash import xxh3_128

ROOT = Path(__file__).parent.parent
PIECE = 1 << 20


def prepare(work: Path) -> None:
    """Make the checkpoint, convert it, record its golden; what is there already stays."""
    import bridge

    if not (work / "out").exists():
        if not (work / "llama-1b").exists():
            make_checkpoint(work / "llama-1b", SMALL)
        bridge.convert(work / "llama-1b", "hf", "none", work / "out", verify=False)
    bridge.golden.record(work / "out", work / "golden", run=False)


def read(files: list[Path], threads: int) -> None:
    """Read every byte once."""
    opened = [os.open(path, os.O_RDONLY) for path in files]
    pieces = [(fd, at) for fd in opened for at in range(0, os.fstat(fd).st_size, PIECE)]
    buffers = [bytearray(PIECE) for _ in range(threads)]

    def share(number: int) -> None:
        for fd, at in pieces[number::threads]:
            os.preadv(fd, [buffers[number]], at)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))
    for fd in opened:
        os.close(fd)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench-golden")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    made = multiprocessing.get_context("spawn").Process(target=prepare, args=(args.work,))  # its memory is not ours
    made.start()
    made.join()

    import bridge

    out, golden = args.work / "out", args.work / "golden"
    files, threads = sorted(out.glob("*.safetensors")), len(os.sched_getaffinity(0))

    def check() -> None:
        assert bridge.golden.check(golden, out).passed

    for name, hash_ in (("XXH3", xxh3_128), ("SHA-256", hashlib.sha256)):
        data = bytes(1 << 28)
        _, processor = timed(lambda hash_=hash_, data=data: hash_(data))
        print(f"{name} of {len(data) >> 20} MiB in memory: {len(data) / processor / 1e9:.1f} GB/s of processor time")
    check()  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ratios: list[tuple[float, ...]] = []
    for _ in range(args.rounds):
        one, one_cpu = timed(lambda: read(files, 1))
        many, _ = timed(lambda: read(files, threads))
        ours, ours_cpu = timed(check)
        ratios.append((ours / one, ours / many, ours_cpu / one_cpu))
        print(
            f"read {one:5.2f} s  read, {threads} threads {many:5.2f} s  check {ours:5.2f} s: {ours / one:.2f} and "
            f"{ours / many:.2f} x; processor {one_cpu:.2f} and {ours_cpu:.2f} s: {ours_cpu / one_cpu:.2f} x",
            flush=True,
        )
    wall, wide, processor = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median: {wall:.2f} x read, {wide:.2f} x read on {threads} threads, {processor:.2f} x its processor time")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    size = sum(path.stat().st_size for path in files)
    print(f"{size / 1e9:.2f} GB; resident memory grew by {grown / 1e3:.1f} MB to {(before + grown) / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
