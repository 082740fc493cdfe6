"""Kernels that read rows once write the bits of the reference, and refuse rows with a bad number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge.core.errors import SourceError
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.encode import Encoder
from tests.oracles import codec_oracle

FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn"
CASES = {
    "fp8": ((Numeric(FP8, "tensor"),), Encoding()),
    "fp8, 16-bit quotient": ((Numeric(FP8, "tensor"),), Encoding(quotient="weight")),
    "fp8_pc_pt": ((Numeric(FP8, "channel"),), Encoding()),
    "int8": ((Numeric("int8", "channel"),), Encoding()),
    "int4": ((Numeric("int4", "block", (128,)),), Encoding()),
    "int4 of 32": ((Numeric("int4", "block", (32,)),), Encoding()),
    "int4, two rows a byte": ((Numeric("int4", "block", (128,)),), Encoding(packed="out")),
    "int4, eight to an int32": ((Numeric("int4", "block", (64,)),), Encoding(packed="int32")),
    "w4a8": ((Numeric("int4", "block", (128,)), Numeric(FP8, "tensor")), Encoding(packed="out")),
    "nvfp4": ((Numeric(FP4, "block", (16,), FP8),), Encoding()),
}
OTHERS = {  # what more than one kernel encodes
    "float16": ("float16", Numeric(FP8, "channel"), Encoding(), 256),
    "another dtype of the target": ("bfloat16", Numeric(FP8, "channel"), Encoding(cast="float16"), 256),
    "quotients of 16 bits": ("bfloat16", Numeric(FP8, "channel"), Encoding(quotient="weight"), 256),
    "scales of 16 bits": ("bfloat16", Numeric("int4", "block", (128,)), Encoding(scale_dtype="bfloat16"), 256),
    "another bound": ("bfloat16", Numeric("int8", "channel"), Encoding(bound=127.5), 256),
    "a short block": ("bfloat16", Numeric("int4", "block", (128,)), Encoding(), 320),
    "blocks of 8": ("bfloat16", Numeric("int4", "block", (8,)), Encoding(), 256),
    "searched scales": ("bfloat16", Numeric("int4", "block", (128,), search="mse"), Encoding(), 256),
    "reciprocal scales": ("bfloat16", Numeric(FP4, "block", (16,), FP8), Encoding(reciprocal=True), 256),
}


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows of bfloat16 words."""
    normal = rng.standard_normal((6, 256)).astype(np.float32)
    any_bits = rng.integers(0, 1 << 16, (64, 256)).astype(np.uint16)
    any_bits[(any_bits & 0x7F80) == 0x7F80] = 0x8000  # -0 in place of NaN and infinity
    singles = {
        "normal": normal * np.float32(0.02),
        "ties": rng.integers(-28, 29, (6, 256)) * np.exp2(rng.integers(-3, 3, (6, 1))),
        "far apart": normal * np.exp2(rng.integers(-120, 120, (6, 1))),
        "sparse": normal * (rng.random((6, 256)) < 0.02),
    }
    words = {
        name: (single.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for name, single in singles.items()
    }
    zeros = rng.integers(0, 2, (6, 256)).astype(np.uint16) << 15
    subnormal = rng.integers(0, 128, (6, 256)).astype(np.uint16) | zeros
    return words | {"any": any_bits, "zero": zeros, "subnormal": subnormal}


def encoder_of(case: str, words: np.ndarray) -> Encoder:
    numeric, coding = CASES[case]
    amax = float((words & 0x7FFF).max().astype(np.uint32).__lshift__(16).view(np.float32))
    return Encoder(numeric, "bfloat16", words.shape, coding=coding, amax=amax, name="w")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_writes_the_bits_of_the_reference(case: str) -> None:
    numeric, coding = CASES[case]
    for name, words in weights(np.random.default_rng(0)).items():
        encoder = encoder_of(case, words)
        assert encoder._fused or (case, name) == ("nvfp4", "subnormal"), name
        weight = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
        theirs = codec_oracle.encode(weight, numeric, coding=coding)
        for part, array in {**encoder.constants(), **encoder.rows(words, 0)}.items():
            assert array.dtype.itemsize == theirs[part].element_size()
            assert array.tobytes() == theirs[part].numpy().tobytes(), f"{name}: {part}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFF81])
def test_one_pass_refuses_rows_that_are_not_finite(case: str, bad: int) -> None:
    words = np.full((6, 256), 0x3F80, np.uint16)
    encoder = encoder_of(case, words)
    words[5, 255] = bad
    kind = "infinity" if bad & 0x7F == 0 else "NaN"
    with pytest.raises(SourceError, match=rf"w: {kind} in 1 block of rows 8 to 14, .* the first is block \([05], "):
        encoder.rows(words, 8)


@pytest.mark.parametrize("rounded", [True, False])
def test_a_given_amax_below_the_weight_s_saturates(rounded: bool) -> None:
    words = weights(np.random.default_rng(1))["normal"]
    coding = Encoding(quotient="weight" if rounded else "float32")
    encoder = Encoder((Numeric(FP8, "tensor"),), "bfloat16", words.shape, coding=coding, amax=0.01)
    weight = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    theirs = codec_oracle.encode(weight, (Numeric(FP8, "tensor"),), coding=coding, amax=0.01)["codes"]
    codes = encoder.rows(words, 0)["codes"]
    assert encoder._fused and {0x7E, 0xFE} <= set(codes.reshape(-1).tolist())
    np.testing.assert_array_equal(codes, theirs.view(torch.uint8).numpy())


@pytest.mark.parametrize("case", OTHERS)
def test_other_codings_are_not_encoded_in_one_pass(case: str) -> None:
    dtype, numeric, coding, cols = OTHERS[case]
    assert Encoder((numeric,), dtype, (6, cols), coding=coding, amax=1.0)._fused is None
