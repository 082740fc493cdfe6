"""Triton kernels give the bits of the torch reference, on a GPU or in Triton's interpreter (`tests/conftest.py`)."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.quant import reference, reference_groups
from bridge.values import Numeric

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="the GPU kernels are an extra: pip install qbridge[gpu]; Linux only")

NAMES = ("amax", "decode", "fp4", "fp8", "groups", "integer", "layout", "mx", "scales", "transpose")
gpu = {name: importlib.import_module(f"bridge._kernels.gpu.{name}") for name in NAMES}
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # the interpreter computes in NumPy

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DROP = {"bfloat16": 16, "float16": 13, "float32": 0}
SHAPES = [(2, 2), (6, 130), (131, 256), (4, 32)]
CODES = ("fp8", "int8", "int4")
SCALES = (1.0, 0.37, 1e-40, 3e38)
CHANNEL = Numeric("int8", "channel")
INT4 = Numeric("int4", "block", (128,))
NVFP4 = Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn")
MX = {
    "mxfp8": Numeric("float8_e4m3fn", "block", (32,), "float8_e8m0fnu"),
    "mxfp4": Numeric("float4_e2m1fn", "block", (32,), "float8_e8m0fnu"),
}


def here(t: torch.Tensor) -> torch.Tensor:
    return t.to(DEVICE)


def same(ours: torch.Tensor, expected: torch.Tensor, what: Any = "") -> None:
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), what
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    wrong = (ours.cpu().view(width) != expected.contiguous().view(width)).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} of {ours.numel()} differ, the first at {wrong[0].tolist()}"


def weight(shape: tuple[int, int], dtype: str) -> torch.Tensor:
    """Random rows of different size, a zero row, zeros of both signs, a block that is small beside its neighbours."""
    generator = torch.Generator().manual_seed(shape[0])
    w = torch.randn(shape, generator=generator)
    w *= torch.exp2(torch.randint(-14, 8, (shape[0], 1), generator=generator))
    w[shape[0] // 2] = 0
    w[0, :2] = -0.0
    w[-1, :16] *= 2.0**-20
    return w.to(DTYPES[dtype])


def every(dtype: str) -> torch.Tensor:
    """All patterns of 16 bits; for float32 the neighbourhood of the ties of all formats, and random patterns."""
    if dtype != "float32":
        return torch.arange(1 << 16).to(torch.int16).view(DTYPES[dtype]).reshape(128, 512)
    ties = [torch.arange(256) * 2.0**-13, torch.arange(256) / 4, torch.tensor([5.0, 126.5, 127.5, 128.5, 464.0, 480.0])]
    near = torch.cat(ties).view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    edge = torch.tensor([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 1, 0x7FFFFF, 0], dtype=torch.int32)
    random = torch.randint(-(2**31), 2**31, (1 << 14,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    u = torch.cat([near.flatten(), near.flatten() ^ -(2**31), edge, edge ^ -(2**31), random])
    return u[: len(u) // 64 * 64].view(torch.float32).reshape(-1, 64)


def codes_of(kind: str, w: torch.Tensor, scale: torch.Tensor, down: int, across: int, drop: int = 0) -> torch.Tensor:
    if kind == "int4":
        return gpu["layout"].unpack(gpu["integer"].int4(here(w), here(scale), down, across, drop=drop), signed=True)
    module = "fp8" if kind == "fp8" else "integer"
    return getattr(gpu[module], kind)(here(w), here(scale), down, across, drop).view(torch.uint8)


def reference_codes(kind: str, w: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    if kind == "fp8":
        return reference.fp8(w, divisor)
    return reference.integer(w, divisor, *reference.INTEGER_RANGE[kind]).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CODES)
def test_every_pattern_gets_the_reference_code(kind: str, dtype: str) -> None:
    w = every(dtype)
    for scale in SCALES:
        grid = torch.full((1, 1), scale)
        same(codes_of(kind, w, grid, *w.shape), reference_codes(kind, w, grid), scale)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CODES)
def test_every_bfloat16_pattern_with_scales_that_make_ties(kind: str) -> None:
    w = every("bfloat16")
    for mantissa in range(128, 256, 9):
        for bound in (448, 127, 7):
            grid = torch.full((1, 1), mantissa * 2.0**-7 / bound)
            same(codes_of(kind, w, grid, *w.shape), reference_codes(kind, w, grid), (mantissa, bound))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", CODES)
def test_a_quotient_may_be_rounded_to_the_weights_dtype_first(kind: str, dtype: str) -> None:
    w = every(dtype)
    w[w.isnan()] = 0  # torch's cast to bfloat16 does not keep the sign of a NaN
    grid = torch.full((1, 1), 0.37)
    quotient = (w.float() / grid).to(w.dtype)
    same(codes_of(kind, w, grid, *w.shape, DROP[dtype]), reference_codes(kind, quotient, torch.ones(())))


@pytest.mark.parametrize("block", [(1, 38), (1, 16), (4, 6), (9, 38), (1, 2), (128, 128), (1, 1500)])
@pytest.mark.parametrize("kind", CODES)
def test_each_value_is_divided_by_the_scale_of_its_block(kind: str, block: tuple[int, int]) -> None:
    rows, cols = (3, 2100) if block[1] == 1500 else (9, 38)
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).bfloat16()
    grid = torch.rand(-(-rows // block[0]), -(-cols // block[1])) * 0.3 + 0.01
    divisor = reference.expand(grid, rows, cols, *block)
    same(codes_of(kind, w, grid, *block), reference_codes(kind, w, divisor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (9, 37), (130, 129), (3, 2600)])
def test_amax_is_the_reference_amax(shape: tuple[int, int], dtype: str) -> None:
    w = weight((shape[0] + 1, shape[1] + 20), dtype)[1:, 20:]
    for block in [(1, 10**6), (10**6, 10**6), (1, 16), (1, 3), (128, 128), (10**6, 1), (4, 1), (2, 64)]:
        cut = min(block[0], shape[0]), min(block[1], shape[1])
        same(gpu["amax"].amax(here(w), *block), reference.block_amax(w, *cut), block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_bad_value_shows_in_its_block_and_nowhere_else(bad: float, dtype: str) -> None:
    w = torch.ones(6, 48, dtype=DTYPES[dtype])
    w[4, 33] = bad
    for block, at in (((1, 16), (4, 2)), ((1, 48), (4, 0)), ((3, 32), (1, 1)), ((6, 1), (0, 33)), ((6, 48), (0, 0))):
        found = gpu["amax"].amax(here(w), *block).cpu()
        assert torch.equal(found[at].nan_to_num(7), torch.tensor(abs(bad)).nan_to_num(7))
        assert found.isfinite().sum() == found.numel() - 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_the_reference_scales(dtype: str) -> None:
    amax = torch.tensor([0.0, 2.0**-149, 2.0**-130, 2.0**-20, 0.1, 448.0, 3e38])
    for bound in (448.0, 127.0, 7.0):
        same(gpu["scales"].scale(here(amax), bound, DTYPES[dtype]), reference.scale(amax, bound, DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 5000)])
def test_int8_rows_is_the_reference(shape: tuple[int, int], dtype: str) -> None:
    w = weight(shape, dtype)
    expected = reference.encode(w, (CHANNEL,))
    codes, scale = gpu["integer"].int8_rows(here(w))
    same(scale, expected["scale"])
    same(codes, expected["codes"])
    same(
        gpu["decode"].decode(codes, scale[:, None], "int8", 1, shape[1]), reference.decode(expected, (CHANNEL,), shape)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", ["in", "out"])
@pytest.mark.parametrize("shape", [(2, 2), (6, 130), (132, 256)])
def test_int4_is_packed_along_either_axis_and_read_back(shape: tuple[int, int], packed: str, dtype: str) -> None:
    w = weight(shape, dtype)
    expected = reference.encode(w, (INT4,))
    codes = reference.pack(reference.unpack(expected["codes"]), packed)
    scale = here(expected["scale"])
    found = gpu["integer"].int4(here(w), scale, 1, 128, packed)
    same(found, codes)
    read = gpu["decode"].decode(found, scale, "int4", 1, 128, packed=packed)
    same(read, reference.decode(expected, (INT4,), shape))
    same(gpu["layout"].pack(here(reference.unpack(codes, packed)), packed), codes)
    same(gpu["layout"].unpack(found, packed), reference.unpack(codes, packed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_the_reference(shape: tuple[int, int], dtype: str) -> None:
    w = weight(shape, dtype)
    expected = reference.encode(w, (NVFP4,))
    found = gpu["fp4"].nvfp4(here(w), here(w.abs().max().float()))
    for ours, part in zip(found, ("codes", "scale", "scale_2"), strict=True):
        same(ours, expected[part], part)
    codes, scale, second = found
    read = gpu["decode"].decode(codes, scale, "float4_e2m1fn", 1, 16, scale_dtype="float8_e4m3fn", scale_2=second)
    same(read, reference.decode(expected, (NVFP4,), shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_of_every_pattern_is_the_reference(dtype: str) -> None:
    """Under a given global scale: blocks with NaN and infinity, subnormals, blocks beyond the largest scale."""
    w = every(dtype)
    for amax in (1.0, 2.0**-20, 3e38):
        expected = reference.encode(w, (NVFP4,), amax=amax)
        codes, scale, _ = gpu["fp4"].nvfp4(here(w), here(torch.tensor(amax)))
        same(scale, expected["scale"], amax)
        same(codes, expected["codes"], amax)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MX)
def test_mx_is_the_reference(name: str, dtype: str) -> None:
    patterns = every(dtype)
    patterns[~patterns.isfinite()] = 0  # a block that holds no number has no power of two
    for w in (patterns, *(weight(shape, dtype) for shape in SHAPES)):
        expected = reference.encode(w, (MX[name],))
        codes, scale = getattr(gpu["mx"], name)(here(w))
        same(scale, expected["scale"], tuple(w.shape))
        same(codes, expected["codes"], tuple(w.shape))
        read = gpu["decode"].decode(codes, scale, MX[name].dtype, 1, 32, scale_dtype="float8_e8m0fnu")
        same(read, reference.decode(expected, (MX[name],), tuple(w.shape)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (131, 257)])
def test_group_casts_are_the_reference(shape: tuple[int, int], dtype: str) -> None:
    groups, w = gpu["groups"], weight((shape[0] + 1, shape[1] + 20), dtype)[1:, 20:]
    pairs = [(groups.groupwise_activation_quant(here(w)), reference_groups.by_quotient(w, 128, 1e-9))]
    for block in (48, 2000):
        pairs += [(groups.groupwise_activation_quant(here(w), block), reference_groups.by_quotient(w, block, 1e-9))]
    for power in (False, True):
        token = groups.per_token_cast_to_fp8(here(w), use_ue8m0=power)
        block = groups.per_block_cast_to_fp8(here(w), use_ue8m0=power)
        pairs += [(token, reference_groups.by_product(w, 1, 128, 1e-4, power))]
        pairs += [(block, reference_groups.by_product(w, 128, 128, 1e-4, power))]
    for at, (ours, expected) in enumerate(pairs):
        same(ours[1], expected[1], at)
        same(ours[0], expected[0], at)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_group_casts_of_every_finite_pattern(dtype: str) -> None:
    w = every(dtype)
    w[~w.isfinite()] = 0
    for ours, expected in (
        (gpu["groups"].groupwise_activation_quant(here(w)), reference_groups.by_quotient(w, 128, 1e-9)),
        (gpu["groups"].per_token_cast_to_fp8(here(w)), reference_groups.by_product(w, 1, 128, 1e-4, False)),
    ):
        same(ours[1], expected[1])
        same(ours[0], expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_dequantizes_as_the_reference(dtype: str) -> None:
    codes = torch.arange(256).to(torch.uint8).repeat(5, 1)
    scale = torch.tensor([[0.37, 3.0]])
    expected = reference_groups.dequantize(codes, scale, 128, DTYPES[dtype])
    ours = gpu["groups"].dequantize_from_fp8(here(codes), here(scale), DTYPES[dtype]).cpu()
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan)
    same(ours.masked_fill(nan, 0), expected.masked_fill(nan, 0))


@pytest.mark.parametrize("shape", [(1, 1), (65, 130), (64, 64)])
def test_transposes_are_transposes_and_quantize_on_the_way(shape: tuple[int, int]) -> None:
    for dtype in DTYPES:
        w = weight((shape[0], shape[1] + 20), dtype)[:, 20:].contiguous()
        same(gpu["transpose"].transpose(here(w)), w.T)
        scale = torch.rand(1, shape[1]) + 0.01
        for name, kind in (("float8_e4m3fn", "fp8"), ("int8", "int8")):
            ours = gpu["transpose"].transposed_codes(here(w), here(scale), name, shape[0], 1)
            same(ours.view(torch.uint8), reference_codes(kind, w, scale).T)
    same(gpu["transpose"].transpose(here(w.to(torch.int8))), w.to(torch.int8).T)


@pytest.mark.slow
def test_every_kernel_compiles_for_nvidia_without_an_approximate_operation() -> None:
    """No GPU is needed to compile for one: `compile_triton.py` calls every function and stops after the compiler."""
    script = Path(__file__).parent / "compile_triton.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(script), "90"], env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    kernels = json.loads(run.stdout)
    assert {name.partition(".")[0] for name in kernels} == set(NAMES)
    for name, operations in kernels.items():
        banned = [op for op in operations if re.search(r"ftz|approx|div\.full|fma|mad\.f32", op)]
        assert not banned, f"{name}: {banned}"
    assert any("div.rn.f32" in operations for operations in kernels.values())
