"""Rates of the Triton kernels as a share of a copy on the same GPU in the same run; must never report a cold call.

    python benchmarks/gpu_kernels.py [--megabytes 1024] [--dtype bfloat16] [case ...]

Bytes moved are those a kernel has to read and write once; the copy moves as many bytes as the weight has, twice. Both
are medians of repeated launches with the cache of the GPU cleared in between.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

COLS = 4096
Work = Callable[[], object]


def cases(w: torch.Tensor) -> dict[str, tuple[float, Work]]:
    """Return name -> (bytes moved, launch)."""
    from bridge._kernels.gpu import amax, decode, fp4, fp8, groups, integer, layout, mx, transpose

    rows, cols = w.shape
    n, read = w.numel(), w.nbytes
    one = torch.full((1, 1), 0.01, device=w.device)
    per_row = torch.full((rows, 1), 0.01, device=w.device)
    per_128 = torch.full((rows, cols // 128), 0.01, device=w.device)
    blocks = torch.full((rows // 128, cols // 128), 0.01, device=w.device)
    e8m0 = torch.full((rows, cols // 32), 120, dtype=torch.uint8, device=w.device)
    e4m3 = torch.full((rows, cols // 16), 0x38, dtype=torch.uint8, device=w.device)
    whole = w.abs().max().float()
    codes = torch.randint(0, 120, w.shape, dtype=torch.uint8, device=w.device)
    packed = codes[:, : cols // 2].contiguous()
    return {
        "amax per tensor": (read, lambda: amax.amax(w, rows, cols)),
        "amax per row": (read, lambda: amax.amax(w, 1, cols)),
        "amax per column": (read, lambda: amax.amax(w, rows, 1)),
        "amax per block of 16": (read + n / 4, lambda: amax.amax(w, 1, 16)),
        "amax per 128 x 128": (read, lambda: amax.amax(w, 128, 128)),
        "fp8 per tensor": (read + n, lambda: fp8.fp8(w, one, rows, cols)),
        "fp8 per row": (read + n, lambda: fp8.fp8(w, per_row, 1, cols)),
        "fp8 per 128 x 128": (read + n, lambda: fp8.fp8(w, blocks, 128, 128)),
        "int8 per row": (read + n, lambda: integer.int8(w, per_row, 1, cols)),
        "int8 per row, amax included": (read + n, lambda: integer.int8_rows(w)),
        "int4 per 128, two columns a byte": (read + n / 2, lambda: integer.int4(w, per_128, 1, 128)),
        "int4 per 128, two rows a byte": (read + n / 2, lambda: integer.int4(w, per_128, 1, 128, "out")),
        "nvfp4": (read + n * 9 / 16, lambda: fp4.nvfp4(w, whole)),
        "mxfp8": (read + n * 33 / 32, lambda: mx.mxfp8(w)),
        "mxfp4": (read + n * 17 / 32, lambda: mx.mxfp4(w)),
        "groupwise_activation_quant": (read + n, lambda: groups.groupwise_activation_quant(w)),
        "per_token_cast_to_fp8": (read + n, lambda: groups.per_token_cast_to_fp8(w)),
        "per_block_cast_to_fp8": (read + n, lambda: groups.per_block_cast_to_fp8(w)),
        "dequantize_from_fp8": (3 * n, lambda: groups.dequantize_from_fp8(codes, blocks)),
        "decode int4": (2.5 * n, lambda: decode.decode(packed, per_128, "int4", 1, 128, out=torch.bfloat16)),
        "decode nvfp4": (
            n * 41 / 16,
            lambda: decode.decode(
                packed, e4m3, "float4_e2m1fn", 1, 16, scale_dtype="float8_e4m3fn", scale_2=whole, out=torch.bfloat16
            ),
        ),
        "decode mxfp8": (
            n * 97 / 32,
            lambda: decode.decode(
                codes, e8m0, "float8_e4m3fn", 1, 32, scale_dtype="float8_e8m0fnu", out=torch.bfloat16
            ),
        ),
        "pack": (1.5 * n, lambda: layout.pack(codes)),
        "unpack": (1.5 * n, lambda: layout.unpack(packed)),
        "transpose": (2 * read, lambda: transpose.transpose(w)),
        "fp8 per row, transposed": (read + n, lambda: transpose.transposed_codes(w, per_row, "float8_e4m3fn", 1, cols)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="words that a case must contain one of")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} sees no CUDA device here, and a rate of Triton's interpreter says nothing; "
            "run this on a machine with an NVIDIA GPU, a torch built for CUDA and `pip install qbridge[gpu]`"
        )
    from triton.testing import do_bench

    dtype = getattr(torch, options.dtype)
    rows = options.megabytes * 2**20 // dtype.itemsize // COLS // 128 * 128
    w = torch.randn(rows, COLS, device="cuda").to(dtype)
    target = torch.empty_like(w)
    copy = 2 * w.nbytes / do_bench(lambda: target.copy_(w), return_mode="median") / 1e6
    print(f"{torch.cuda.get_device_name()}, {options.dtype} ({rows}, {COLS}), copy {copy:.0f} GB/s\n")
    print("| case | bytes moved a value | GB/s | % copy |\n|---|---|---|---|")
    for name, (moved, work) in cases(w).items():
        if options.case and not any(word in name for word in options.case):
            continue
        rate = moved / do_bench(work, return_mode="median") / 1e6
        print(f"| {name} | {moved / w.numel():.3g} | {rate:.0f} | {100 * rate / copy:.0f} |", flush=True)


if __name__ == "__main__":
    main()
