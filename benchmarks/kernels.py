"""Rates of the CPU kernels as a share of a copy of the same bytes in the same run; must never report a cold call.

    python benchmarks/kernels.py [--megabytes 256] [--rounds 6] [--nanoseconds] [case ...]

Every case runs through the functions that conversion and verification call (`Encoder`, `encode`, `compare`, `bits`), on
normal random values, 4,096 columns, in pieces of 256 rows (2 MB of bfloat16) as the stream reads them. A round
measures a copy (into memory that was touched before) and then the case, with one thread and with two (each on half of
the rows). Time is processor time of the slowest thread, so other processes count only through caches and memory; the
minimum of the rounds is reported.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import numpy as np

from bridge.core.values import Encoding, Numeric
from bridge.quant.codec import arrays as b
from bridge.quant.codec.encode import Encoder, encode
from bridge.verification.weight_error import compare
from bridge.workflows.inspect.statistics.losses import losses
from bridge.workflows.inspect.statistics.quantization import Quantization, of_recipe
from bridge.workflows.inspect.statistics.sums import Blocks, TensorSums

COLS, ROWS = 4096, 256
FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn"
PLAIN, ROUNDED, HIGH, WORDS = Encoding(), Encoding(quotient="weight"), Encoding(packed="out"), Encoding(packed="int32")
#  name                          bytes a value  numeric                                         coding
CODES = (
    ("fp8",                      1,             Numeric(FP8, "tensor"),                         PLAIN),
    ("fp8, 16-bit quotient",     1,             Numeric(FP8, "tensor"),                         ROUNDED),
    ("fp8_pc_pt",                1,             Numeric(FP8, "channel"),                        PLAIN),
    ("fp8_block",                1,             Numeric(FP8, "block", (128, 128)),              PLAIN),
    ("int8",                     1,             Numeric("int8", "channel"),                     PLAIN),
    ("int4, two columns a byte", 0.5,           Numeric("int4", "block", (128,)),               PLAIN),
    ("int4, two rows a byte",    0.5,           Numeric("int4", "block", (128,)),               HIGH),
    ("int4, eight to an int32",  0.5,           Numeric("int4", "block", (128,)),               WORDS),
    ("nvfp4",                    0.5625,        Numeric(FP4, "block", (16,), FP8),              PLAIN),
    ("int4_mse",                 0.5,           Numeric("int4", "block", (128,), search="mse"), PLAIN),
    ("nvfp4_mse",                0.5625,        Numeric(FP4, "block", (16,), FP8, search="mse"), PLAIN),
    ("nvfp4_four_over_six",      0.5625,        Numeric(FP4, "block", (16,), FP8, search="four_over_six"), PLAIN),
    ("mxfp8",                    1.03125,       Numeric(FP8, "block", (32,), "float8_e8m0fnu"), PLAIN),
    ("mxfp4",                    0.53125,       Numeric(FP4, "block", (32,), "float8_e8m0fnu"), PLAIN),
)  # fmt: skip
OTHERS = ("fp8", "int8", "int4, two rows a byte", "nvfp4")  # also measured on other dtypes, transposed and read back
Work = Callable[[np.ndarray], object]


def cases(dtype: str) -> dict[str, tuple[float, Work]]:
    """Return name -> (bytes written for each value, work on rows of a storage array)."""
    made = {f"rows to {name}": (size, _encoder(dtype, numeric, coding)) for name, size, numeric, coding in CODES}
    made = _inspections(dtype) | made
    if dtype != "bfloat16":
        others = {f"rows to {name}" for name in OTHERS} | _inspections(dtype).keys()
        return {name: case for name, case in made.items() if name in others}
    found: dict[str, tuple[float, Work]] = {
        "amax per tensor": (0, lambda w: b.amax(w, dtype, *w.shape)),
        "amax per row": (0, lambda w: b.amax(w, dtype, 1, COLS)),
        "amax per block of 16": (0.125, lambda w: b.amax(w, dtype, 1, 16)),
        "amax per block of 128": (0.016, lambda w: b.amax(w, dtype, 1, 128)),
        "amax per 128 x 128": (0, lambda w: b.amax(w, dtype, 128, 128)),
        "cast to float16": (2, _pieces(lambda w: b.cast(w, dtype, "float16"))),
        "cast to float32": (4, _pieces(lambda w: b.cast(w, dtype, "float32"))),
        "smooth": (2, _pieces(lambda w: b.smooth(w, dtype, np.full(COLS, 3, np.float32)))),
        "transposed copy": (2, b.transposed),
        **made,
    }
    for name, size, numeric, coding in CODES:
        if name in OTHERS:
            found[f"transposed {name}"] = (size, _whole(dtype, numeric, transpose=True))
            found[f"compare {name}"] = (0, _comparer(dtype, numeric, coding))
    found["Conv1D to fp8_pc_pt"] = (1, _whole(dtype, Numeric(FP8, "channel"), layout="in_out", transpose=True))
    return found


def _inspections(dtype: str) -> dict[str, tuple[float, Work]]:
    """What `bridge.inspect` computes of a tensor: all of its sums, and the losses of some formats."""
    some = "fp8", "int8", "nvfp4", "mxfp8"
    hows = {name: Quantization((numeric,)) for name, _, numeric, _ in CODES if name in some}
    hows["Transformer Engine's E4M3"] = of_recipe("fp8_current_scaling", "activation")
    hows["Transformer Engine's E5M2"] = of_recipe("fp8_current_scaling", "gradient")
    return {
        "inspect: statistics": (0, lambda w: TensorSums().add(w, dtype)),
        "inspect: statistics without percentiles": (0, lambda w: TensorSums(magnitudes=False).add(w, dtype)),
        "inspect: the same and blocks of 32": (0, lambda w: TensorSums([Blocks()], magnitudes=False).add(w, dtype)),
        **{f"inspect: losses of {name}": (0, _losses(dtype, how)) for name, how in hows.items()},
    }


def _losses(dtype: str, how: Quantization) -> Work:
    return lambda w: losses(w, dtype, how)


def _pieces(work: Work) -> Work:
    def run(w: np.ndarray) -> None:
        for first in range(0, len(w), ROWS):
            work(w[first : first + ROWS])

    return run


def _encoder(dtype: str, numeric: Numeric, coding: Encoding) -> Work:
    memory: dict[int, dict[str, np.ndarray]] = {}  # of each thread's part, as the stream holds it for each thread

    def run(w: np.ndarray) -> None:
        held = memory.setdefault(w.ctypes.data, {})

        def take(purpose: str, shape: tuple[int, ...], kind: object) -> np.ndarray:
            if purpose not in held or held[purpose].shape != shape:
                held[purpose] = np.empty(shape, kind)  # type: ignore[call-overload]
            return held[purpose]

        encoder = Encoder((numeric,), dtype, w.shape, coding=coding, amax=6.0, take=take)
        for first in range(0, len(w), ROWS):
            encoder.rows(w[first : first + ROWS], first)

    return run


def _whole(dtype: str, numeric: Numeric, *, layout: str = "out_in", transpose: bool) -> Work:
    return lambda w: encode(w, dtype, (numeric,), layout=layout, transpose=transpose, amax=6.0)


def _comparer(dtype: str, numeric: Numeric, coding: Encoding) -> Work:
    known: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def run(w: np.ndarray) -> None:
        for first in range(0, len(w), ROWS):
            piece = w[first : first + ROWS]
            key = (piece.ctypes.data, len(piece))
            if key not in known:  # in the round that is not measured
                known[key] = encode(piece, dtype, (numeric,), coding=coding)
            compare(piece, dtype, known[key], (numeric,), coding=coding)

    return run


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
    parser.add_argument("--nanoseconds", action="store_true", help="a value on one thread, instead of GB/s")
    options = parser.parse_args()
    columns = ["1 thread GB/s", "% copy", "2 threads GB/s", "% copy"]
    columns = ["case", "bytes moved a value", *(["ns a value"] if options.nanoseconds else columns)]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for dtype in b.FLOATS:
        weight = source(dtype, options.megabytes)
        for name, (size, work) in cases(dtype).items():
            full = name if dtype == "bfloat16" else f"{name}, from {dtype}"
            if not options.case or any(word in full for word in options.case):
                measure = nanoseconds if options.nanoseconds else rates
                print(f"| {full} | {weight.itemsize + size:g} |{measure(weight, work, options.rounds)}", flush=True)


def source(dtype: str, megabytes: int) -> np.ndarray:
    """Return normal random values of so many megabytes; the same matrix again and again, which no kernel can see."""
    part = b.cast(np.random.default_rng(0).standard_normal((ROWS, COLS), np.float32), "float32", dtype)
    return np.tile(part, (max(megabytes * 2**20 // part.nbytes, 1), 1))


def nanoseconds(weight: np.ndarray, work: Work, rounds: int) -> str:
    """Return the last cell of one line: ns a value on one thread, the least of the rounds."""
    seconds(work, [weight])
    return f" {min(seconds(work, [weight]) for _ in range(rounds)) / weight.size * 1e9:.1f} |"


def rates(weight: np.ndarray, work: Work, rounds: int) -> str:
    """Return the cells of one line: GB/s of the input and share of a copy, on one thread and on two."""
    target, half = np.empty_like(weight), len(weight) // 2
    start, line = weight.ctypes.data, ""

    def copy(part: np.ndarray) -> None:
        first = (part.ctypes.data - start) // weight.strides[0]
        np.copyto(target[first : first + len(part)], part)

    for parts in ([weight], [weight[:half], weight[half:]]):
        seconds(copy, parts)
        seconds(work, parts)  # compiles, and touches the memory
        pairs = [(seconds(copy, parts), seconds(work, parts)) for _ in range(rounds)]
        base, took = (min(column) for column in zip(*pairs, strict=True))
        line += f" {weight.nbytes / took / 1e9:.1f} | {100 * base / took:.0f} |"
    return line


if __name__ == "__main__":
    main()
