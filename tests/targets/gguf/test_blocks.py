"""ggml's blocks against gguf-py, bit for bit."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from bridge.core.dtypes import from_float32, to_float32
from bridge.core.errors import SchemeError, SourceError
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode

TYPES = gguf.GGMLQuantizationType
MX = Numeric("float4_e2m1fn", "block", (32,), "float8_e8m0fnu")
NV = Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn")
OWN = {"q8_0": Numeric("int8", "block", (32,)), "q4_0": Numeric("int4", "block", (32,))}


def _coding(packed: str) -> Encoding:
    return Encoding(packed=packed, scale_dtype="float16" if packed in OWN else "float32")


def _weights() -> np.ndarray[Any, Any]:
    """Blocks with what rounds unusually: zeros, ties, two extremes of either sign, float16's subnormal scales."""
    weights = np.random.default_rng(0).standard_normal((37, 192)).astype(np.float32)
    weights[3, 32:64] = 0
    weights[4] *= 1e-4
    weights[5, :8] = [8, -8, 7.5, -7.5, 0.5, -0.5, 4, -4]
    weights[6, :8] = [-8, 8, 7.5, -7.5, 1.5, -1.5, 4, -4]
    weights[7, :4] = [127, 0.5, 1.5, -2.5]
    return weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("packed", list(OWN))
def test_integers_in_blocks_of_32_are_those_of_gguf_py(packed: str, dtype: str) -> None:
    bits = from_float32(_weights(), dtype)
    ours = encode(bits, dtype, (OWN[packed],), coding=_coding(packed))
    assert set(ours) == {"codes"}
    theirs = gguf.quants.quantize(to_float32(bits, dtype), TYPES[packed.upper()])
    assert np.array_equal(ours["codes"], theirs)


CODED = {
    "q8_0": [OWN["q8_0"], Numeric("int8", "channel"), Numeric("int8", "block", (64,))],
    "q4_0": [OWN["q4_0"], Numeric("int4", "block", (64,)), Numeric("int4", "channel")],
    "mxfp4": [MX],
    "nvfp4": [NV],
}


@pytest.mark.parametrize(("packed", "numeric"), [(packed, n) for packed, all_ in CODED.items() for n in all_])
def test_gguf_py_reads_the_values_that_we_read(packed: str, numeric: Numeric) -> None:
    weights = _weights()
    arrays = encode(weights, "float32", (numeric,), coding=_coding(packed))
    ours = decode(dict(arrays), (numeric,), weights.shape, coding=_coding(packed))
    theirs = gguf.quants.dequantize(arrays["codes"], TYPES[packed.upper()])
    if "scale_2" in arrays:  # two products of float32, in another order
        np.testing.assert_allclose(ours, theirs * arrays["scale_2"], rtol=2.0**-22)
    else:
        assert np.array_equal(ours, theirs)
    some = decode(dict(arrays), (numeric,), weights.shape, coding=_coding(packed), rows=(5, 9))
    assert np.array_equal(some, ours[5:9])


@pytest.mark.parametrize(("packed", "numeric"), [("mxfp4", MX), ("nvfp4", NV)])
def test_fp4_blocks_hold_the_codes_of_other_targets(packed: str, numeric: Numeric) -> None:
    weights = _weights()
    blocks = encode(weights, "float32", (numeric,), coding=_coding(packed))
    plain = encode(weights, "float32", (numeric,))
    ours = decode(dict(blocks), (numeric,), weights.shape, coding=_coding(packed))
    assert np.array_equal(ours, decode(dict(plain), (numeric,), weights.shape))


def test_wider_blocks_repeat_their_scale_rounded_to_float16() -> None:
    weights, numeric = _weights()[:, :128], Numeric("int4", "block", (128,))
    blocks = encode(np.ascontiguousarray(weights), "float32", (numeric,), coding=_coding("q4_0"))["codes"]
    stored = blocks.reshape(37, 4, 18)[:, :, :2].copy().view(np.float16)[..., 0]
    scale = (np.abs(weights).max(1) / 7).astype(np.float16)
    assert np.array_equal(stored, np.repeat(np.maximum(scale, np.float16(2.0**-24))[:, None], 4, axis=1))


def test_rows_without_whole_blocks_are_refused() -> None:
    with pytest.raises(SchemeError, match="no rows of whole blocks of 32"):
        encode(np.ones((4, 48), np.float32), "float32", (OWN["q8_0"],), coding=_coding("q8_0"))


def test_a_scale_beyond_float16_is_refused() -> None:
    with pytest.raises(SourceError, match="does not fit the float16 of q4_0"):
        encode(np.full((2, 32), 1e6, np.float32), "float32", (OWN["q4_0"],), coding=_coding("q4_0"))
