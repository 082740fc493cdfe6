"""Quantize and dequantize below nvtripy give the codes of torch and ModelOpt, and refuse what an engine refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.oracles.tripy_runtime.against_torch import made, out, same


def finite(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a 16-bit type, padded with zeros to two axes."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    return F.pad(values, (0, -len(values) % 64)).reshape(-1, 64).contiguous()


def theirs_of(x: torch.Tensor) -> torch.Tensor:
    """What torch's fake quantization can take: it rounds to an int64 before it clamps, which larger values overflow."""
    return x.float().clamp(-1e6, 1e6)


RANGES = {"int8": (-128, 127), "int4": (-8, 7)}
SCALE = 2.0**-3  # a power of two, also in float16: torch multiplies by the inverse, which is then exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("coded", ["int8", "int4", "float8"])
def test_quantization_of_every_16_bit_value_is_torchs(
    tp: Any, coded: str, axis: int | None, dtype: torch.dtype
) -> None:
    x = finite(dtype)
    powers = torch.tensor(1.0) if axis is None else 2.0 ** (torch.arange(x.shape[axis]) % 5 - 2)
    scale = powers * SCALE
    quantized = tp.quantize(tp.Tensor(x), tp.Tensor(scale.to(dtype)), getattr(tp, coded), axis)
    got = tp.dequantize(quantized, tp.Tensor(scale.to(dtype)), getattr(tp, str(dtype).removeprefix("torch.")), axis)
    if coded == "float8":
        wide = scale if axis is None else scale.reshape(-1 if axis == 0 else 1, -1 if axis == 1 else 1)
        expected = (x.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn).float() * wide
    elif axis is None:
        expected = torch.fake_quantize_per_tensor_affine(theirs_of(x), scale, torch.tensor(0), *RANGES[coded])
    else:
        zeros = torch.zeros(len(scale), dtype=torch.int32)
        expected = torch.fake_quantize_per_channel_affine(theirs_of(x), scale, zeros, axis, *RANGES[coded])
    assert torch.equal(out(got), expected.to(dtype))


def test_blocks_run_along_the_first_axis(tp: Any) -> None:
    x, scale = made(6, 5), made(3, 5, seed=1).abs() + 0.1
    ours = tp.dequantize(tp.quantize(tp.Tensor(x), tp.Tensor(scale), tp.int4), tp.Tensor(scale), tp.float32)
    rows = x.reshape(3, 2, 5).transpose(1, 2).reshape(15, 2)  # block and column, place in the block
    quantized = torch.fake_quantize_per_channel_affine(rows, scale.flatten(), torch.zeros(15).int(), 0, -8, 7)
    same(ours, quantized.reshape(3, 5, 2).transpose(1, 2).reshape(6, 5))


@pytest.mark.slow
def test_quantization_is_modelopts_but_for_ties(tp: Any) -> None:
    """ModelOpt multiplies by bound / amax, an engine divides by amax / bound: codes may differ near ties."""
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    w = made(512, 384)
    block = {"num_bits": 4, "block_sizes": {-1: 128, "scale_bits": None}}
    settings: list[tuple[str, dict[str, Any], int | None, float]] = [
        ("int8", {"num_bits": 8, "axis": 0}, 0, 127),
        ("int8", {"num_bits": 8, "axis": None}, None, 127),
        ("int4", block, None, 7),
        ("float8", {"num_bits": (4, 3), "axis": None}, None, 448),
    ]
    for coded, config, axis, bound in settings:
        quantizer = TensorQuantizer(QuantizerAttributeConfig(**config))
        quantizer.enable_calib()
        quantizer.disable_quant()
        quantizer(w)
        quantizer.load_calib_amax()
        quantizer.disable_calib()
        quantizer.enable_quant()
        theirs = quantizer(w)
        scale = quantizer.amax.float() / bound
        x, scale = (w.T, scale.reshape(512, 3).T) if coded == "int4" else (w, scale.squeeze())
        s = tp.Tensor(scale.contiguous())
        got = out(
            tp.dequantize(tp.quantize(tp.Tensor(x.contiguous()), s, getattr(tp, coded), axis), s, tp.float32, axis)
        )
        got = got.T if coded == "int4" else got
        different = (got - theirs).abs() > 1e-6 * theirs.abs()
        assert different.float().mean() < 2e-5, coded


REFUSED: list[tuple[str, tuple[int, ...], list[Any], str, int | None]] = [
    ("one scale too few", (6, 4), [0.1] * 5, "int8", 0),
    ("one scale too many", (6, 4), [0.1] * 7, "int8", 0),
    ("axis beyond the rank", (6, 4), [0.1] * 4, "int8", 2),
    ("negative axis", (6, 4), [0.1] * 4, "int8", -1),
    ("zero scale", (6, 4), [0.1, 0.1, 0.1, 0.0], "int8", 1),
    ("negative scale", (6, 4), [0.1, 0.1, 0.1, -0.1], "float8", 1),
    ("infinite scale", (6, 4), [0.1, 0.1, 0.1, float("inf")], "int8", 1),
    ("scale that is not a number", (6, 4), [0.1, 0.1, 0.1, float("nan")], "int8", 1),
    ("blocks that do not divide", (6, 4), [[0.1] * 4] * 4, "int4", None),
    ("blocks of another width", (6, 4), [[0.1] * 3] * 3, "int4", None),
]


@pytest.mark.parametrize(("shape", "scale", "coded", "axis"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED])
def test_scale_that_the_front_end_passes_is_refused(
    stand_in: Any, shape: tuple[int, ...], scale: list[Any], coded: str, axis: int | None
) -> None:
    tp = stand_in
    quantized = tp.quantize(tp.Tensor(made(*shape)), tp.Tensor(scale), getattr(tp, coded), axis)
    with pytest.raises(tp.TripyException, match="quantize"):
        quantized.eval()


def test_error_names_the_users_line(stand_in: Any) -> None:
    tp = stand_in
    with pytest.raises(tp.TripyException, match=r"test_quantization\.py"):
        tp.quantize(tp.Tensor(made(6, 4)), tp.Tensor([0.1, 0.1]), tp.int8, 0).eval()
