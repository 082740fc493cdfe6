"""Compiles every launch of the Triton kernels for an NVIDIA GPU and prints the PTX operations of each; needs no GPU.

    python tests/kernels/compile_triton.py 90        # the compute capability: sm_90

A driver that only knows its target stands in for the real one, and a launch stops after the compiler.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bridge._kernels.gpu import amax, decode, fp4, fp8, groups, integer, layout, mx, scales, transpose

SIZE = 512


class Target:
    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0


def launch_all(w: torch.Tensor) -> None:
    """Call every function on shapes that a real weight has: multiples of 16."""
    rows, grid, blocks = torch.ones(SIZE, 1), torch.ones(SIZE, SIZE // 128), torch.ones(SIZE // 128, SIZE // 128)
    codes, packed = torch.zeros(SIZE, SIZE, dtype=torch.uint8), torch.zeros(SIZE, SIZE // 2, dtype=torch.uint8)
    small = codes[:, : SIZE // 16].contiguous()
    for block in ((SIZE, SIZE), (1, SIZE), (1, 16), (128, 128), (SIZE, 1)):
        amax.amax(w, *block)
    scales.scale(grid, 7.0, w.dtype)
    fp8.fp8(w, rows, 1, SIZE)
    fp8.fp8(w, blocks, 128, 128)
    fp8.fp8(w, torch.ones(1, 1), SIZE, SIZE, 16)
    integer.int8(w, rows, 1, SIZE)
    integer.int8_rows(w)
    fp4.nvfp4(w, torch.ones(()))
    mx.mxfp8(w)
    mx.mxfp4(w)
    for axis in ("in", "out"):
        integer.int4(w, grid, 1, 128, axis)
        layout.pack(codes, axis)
        layout.unpack(packed, axis)
        decode.decode(packed, grid, "int4", 1, 128, packed=axis)
    decode.decode(packed, small, "float4_e2m1fn", 1, 16, scale_dtype="float8_e4m3fn", scale_2=torch.ones(()))
    decode.decode(codes, small, "float8_e4m3fn", 1, 32, scale_dtype="float8_e8m0fnu", out=torch.float16)
    groups.groupwise_activation_quant(w)
    groups.dequantize_from_fp8(codes, blocks)
    for power in (False, True):
        groups.per_token_cast_to_fp8(w, use_ue8m0=power)
        groups.per_block_cast_to_fp8(w, use_ue8m0=power)
    transpose.transpose(w)
    transpose.transpose(codes)
    for dtype in ("float8_e4m3fn", "int8"):
        transpose.transposed_codes(w, torch.ones(1, SIZE), dtype, SIZE, 1)


def main() -> None:
    triton.runtime.driver.set_active(Target(int(sys.argv[1])))
    compile_and_launch = JITFunction.run
    found: dict[str, dict[str, int]] = {}

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made = compile_and_launch(self, *args, grid=grid, warmup=True, **options)
        counts = found.setdefault(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__} {len(found)}", {})
        for operation in re.findall(r"^\s+(?:@\S+ )?([a-z][a-z0-9_.:]+)\s", made.asm["ptx"], re.MULTILINE):
            counts[operation] = counts.get(operation, 0) + 1

    JITFunction.run = compile_only
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        launch_all(torch.zeros(SIZE, SIZE, dtype=dtype))
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        main()
