"""Rates of encoding weights on a GPU, beside a copy there.

Must never count a compilation, nor run without a GPU.

    python benchmarks/gpu_kernels.py [--megabytes 512] [--rounds 20] [case ...]

Every case runs through `bridge.quant.codec.on_device.encode`, as models in memory do, on normal random bfloat16
values, 8,192 columns: Triton's kernels, and plain torch beside them. GB/s counts what is read once and written once.
Time is that of the device (CUDA events) and the least of the rounds; codes are compared with those of the CPU first.
85 % of a copy is wanted where one scale covers blocks; where one scale covers all, a pass for its amax comes before.
Never run so far: there was no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from bridge.core.values import Encoding, Numeric
from bridge.quant.codec import on_device
from bridge.quant.codec.on_device import TORCH, TRITON, Checks, encode

COLS = 8192
FP8, FP4, MX = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu"
#  name                    numeric                                coding
CASES: dict[str, tuple[Numeric, Encoding]] = {
    "fp8":                (Numeric(FP8, "tensor"),                Encoding()),
    "fp8_pc_pt":          (Numeric(FP8, "channel"),               Encoding()),
    "fp8_block":          (Numeric(FP8, "block", (128, 128)),     Encoding()),
    "int8":               (Numeric("int8", "channel"),            Encoding()),
    "int4":               (Numeric("int4", "block", (128,)),      Encoding()),
    "int4, int32":        (Numeric("int4", "block", (128,)),      Encoding(packed="int32")),
    "nvfp4":              (Numeric(FP4, "block", (16,), FP8),     Encoding()),
    "mxfp8":              (Numeric(FP8, "block", (32,), MX),      Encoding()),
    "mxfp4":              (Numeric(FP4, "block", (32,), MX),      Encoding()),
}  # fmt: skip


def least_seconds(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the device for one call: the least of the rounds, after two that compile and allocate."""
    times = []
    for turn in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if turn > 1:
            times.append(begin.elapsed_time(end) / 1000)
    return min(times)


def measured(name: str, weight: torch.Tensor, way: str, rounds: int) -> float:
    """GB/s of a case, whose bytes are those of the CPU."""
    numeric, coding = CASES[name]
    on_device.best_way = lambda tensor: on_device.HOST if tensor.device.type == "cpu" else way
    few = weight[:256]
    ours, theirs = encode(few, (numeric,), coding=coding), encode(few.cpu(), (numeric,), coding=coding)
    for part, tensor in theirs.items():
        same = torch.equal(*(one.cpu().reshape(-1).view(torch.uint8) for one in (ours[part], tensor)))
        assert same, f"{name}: the {part} of {way} is not that of the CPU"
    written = sum(part.nbytes for part in encode(weight, (numeric,), coding=coding).values())
    checks = Checks()  # looked at after the clock
    seconds = least_seconds(lambda: encode(weight, (numeric,), coding=coding, checks=checks), rounds)
    checks.check()
    return (weight.nbytes + written) / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of encoding weights on a GPU.")
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "no GPU: torch.cuda.is_available() is False\n")
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CASES)}")
    weight = torch.randn(given.megabytes * 1_000_000 // 2 // COLS // 128 * 128, COLS, device="cuda").bfloat16()
    target = torch.empty_like(weight)
    copy = 2 * weight.nbytes / least_seconds(lambda: target.copy_(weight), given.rounds) / 1e9
    print(f"{torch.cuda.get_device_name()}, {weight.nbytes / 1e6:.0f} MB, copy {copy:.0f} GB/s")
    print(f"{'':16}{'Triton':>10}{'% copy':>8}{'torch':>10}{'% copy':>8}")
    for name in given.cases or CASES:
        rates = [measured(name, weight, way, given.rounds) for way in (TRITON, TORCH)]
        print(f"{name:16}" + "".join(f"{rate:>10.0f}{rate / copy:>8.0%}" for rate in rates))


if __name__ == "__main__":
    main()
