"""Rates of the CPU kernels as a share of a copy of the same bytes in the same run; must never report a cold call.

    python benchmarks/kernels.py [--megabytes 256] [--rounds 6] [case ...]

Every case runs through the functions that conversion calls (`bridge.quant.encode`, `bits`, `compare`), on bfloat16
with normal random values, 4,096 columns. A round measures a copy (into memory that was touched before) and then the
case (into memory it allocates), with one thread and with two (each on half of the rows). Time is processor time of the
slowest thread, so other processes count only through caches and memory; the minimum of the rounds is reported.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import numpy as np

from bridge.quant import bits as b
from bridge.quant.compare import compare
from bridge.quant.encode import decode, encode
from bridge.values import Numeric

COLS = 4096
WEIGHTS = {
    "fp8": (Numeric("float8_e4m3fn", "tensor"),),
    "fp8_pc_pt": (Numeric("float8_e4m3fn", "channel"),),
    "fp8_block": (Numeric("float8_e4m3fn", "block", (128, 128)),),
    "int8": (Numeric("int8", "channel"),),
    "int4_wo": (Numeric("int4", "block", (128,)),),
    "nvfp4": (Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn"),),
    "mxfp8": (Numeric("float8_e4m3fn", "block", (32,), "float8_e8m0fnu"),),
    "mxfp4": (Numeric("float4_e2m1fn", "block", (32,), "float8_e8m0fnu"),),
}
Work = Callable[[np.ndarray], object]


def cases() -> dict[str, tuple[float, Work]]:
    """Return name -> (bytes written for each value, work on rows of bfloat16 bits)."""
    found: dict[str, tuple[float, Work]] = {
        "amax per tensor": (0, lambda w: b.amax(w, "bfloat16", *w.shape)),
        "amax per row": (0, lambda w: b.amax(w, "bfloat16", 1, COLS)),
        "amax per block of 16": (0.125, lambda w: b.amax(w, "bfloat16", 1, 16)),
        "amax per block of 128": (0.016, lambda w: b.amax(w, "bfloat16", 1, 128)),
        "amax per 128 x 128": (0, lambda w: b.amax(w, "bfloat16", 128, 128)),
        "transposed copy": (2, b.transposed),
        "cast to float16": (2, lambda w: b.cast(w, "bfloat16", "float16")),
        "cast to float32": (4, lambda w: b.cast(w, "bfloat16", "float32")),
        "smooth": (2, lambda w: b.smooth(w, "bfloat16", np.full(COLS, 3, np.float32))),
    }
    for name, numeric in WEIGHTS.items():
        size = 0.5 if "4" in numeric[0].dtype.removeprefix("float8_e4") else 1
        amax = 6.0 if numeric[0].per == "tensor" else None
        for suffix, transpose in (("", False), (", transposed", True)):
            found[f"encode {name}{suffix}"] = (
                size,
                lambda w, n=numeric, t=transpose, a=amax: encode(w, "bfloat16", n, transpose=t, amax=a),
            )
    for name in ("fp8", "int4_wo"):
        found[f"decode {name}, transposed"] = (4, _decoder(WEIGHTS[name]))
        found[f"compare {name}, transposed"] = (0, _comparer(WEIGHTS[name]))
    return found


def _decoder(numeric: tuple[Numeric, ...]) -> Work:
    written = _writer(numeric)

    def work(w: np.ndarray) -> None:
        for first, chunk in b.chunks(w, "bfloat16"):
            decode(written(w), numeric, w.shape, transpose=True, rows=(first, first + len(chunk)))

    return work


def _comparer(numeric: tuple[Numeric, ...]) -> Work:
    written = _writer(numeric)
    return lambda w: compare(w, "bfloat16", written(w), numeric, transpose=True)


def _writer(numeric: tuple[Numeric, ...]) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Return a function that encodes a part when it first meets it: outside of what is measured."""
    known: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def written(w: np.ndarray) -> dict[str, np.ndarray]:
        key = (w.ctypes.data, len(w))
        if key not in known:
            known[key] = encode(w, "bfloat16", numeric, transpose=True)
        return known[key]

    return written


def seconds(work: Work, parts: list[np.ndarray]) -> float:
    """Run `work` on each part in a thread of its own and return the processor time of the slowest thread."""
    took = [0.0] * len(parts)

    def run(at: int) -> None:
        start = time.thread_time()
        work(parts[at])
        took[at] = time.thread_time() - start

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="words that a case must contain one of")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    rows = options.megabytes * 2**20 // 2 // COLS // 256 * 256
    values = np.random.default_rng(0).standard_normal((rows, COLS), np.float32)
    weight = b.cast(values, "float32", "bfloat16")
    del values
    target = np.empty_like(weight)
    halves = [weight[: rows // 2], weight[rows // 2 :]]

    def copy(part: np.ndarray) -> None:
        first = (part.ctypes.data - weight.ctypes.data) // weight.strides[0]
        np.copyto(target[first : first + len(part)], part)

    print(
        "| case | bytes moved a value | 1 thread GB/s | % copy | 2 threads GB/s | % copy |\n|---|---|---|---|---|---|"
    )
    for name, (size, work) in cases().items():
        if options.case and not any(word in name for word in options.case):
            continue
        line = f"| {name} | {2 + size:g} |"
        for parts in ([weight], halves):
            seconds(work, parts)  # compiles, and touches the memory
            pairs = [(seconds(copy, parts), seconds(work, parts)) for _ in range(options.rounds)]
            base, took = (min(column) for column in zip(*pairs, strict=True))
            line += f" {weight.nbytes / took / 1e9:.1f} | {100 * base / took:.0f} |"
        print(line, flush=True)


if __name__ == "__main__":
    main()
