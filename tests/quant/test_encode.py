"""`encode` gives the reference's bytes in every layout, `decode` undoes it, and no bad number leaves."""

from __future__ import annotations

import itertools
import math
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.core.errors import SchemeError, SourceError
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.arrays import cast
from bridge.quant.codec.blocks import stored_shapes
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import Encoder, encode
from bridge.verification.weight_error import compare
from tests.covering import grid
from tests.oracles import codec_oracle

FP8, INT8, INT4, FP4 = "float8_e4m3fn", "int8", "int4", "float4_e2m1fn"
SCHEMES = {
    "fp8": (Numeric(FP8, "tensor"),),
    "fp8_pc_pt": (Numeric(FP8, "channel"),),
    "fp8_block": (Numeric(FP8, "block", (128, 128)),),
    "int8": (Numeric(INT8, "channel"),),
    "int8_tensor": (Numeric(INT8, "tensor"),),
    "int4": (Numeric(INT4, "block", (128,)),),
    "w4a8": (Numeric(INT4, "block", (128,)), Numeric(FP8, "tensor")),
    "nvfp4": (Numeric(FP4, "block", (16,), FP8),),
    "mxfp8": (Numeric(FP8, "block", (32,), "float8_e8m0fnu"),),
    "mxfp4": (Numeric(FP4, "block", (32,), "float8_e8m0fnu"),),
}
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORAGE = {"float8_e4m3fn": np.uint8, "float8_e8m0fnu": np.uint8, "float4_e2m1fn": np.uint8, "int4": np.uint8}


def source(dtype: str, shape: tuple[int, ...] = (330, 274), seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Weights whose rows and columns differ in size, with a zero row and zero blocks; sizes leave odd tails."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 3, (shape[0], *[1] * (len(shape) - 1))))
    values[2] = 0
    values[5, :128] = 0
    bits = cast(values.astype(np.float32), "float32", dtype)
    return bits, torch.from_numpy(cast(bits, dtype, "float32").copy()).to(TORCH[dtype])


def as_numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    brain = torch.bfloat16
    return {name: (t.view(torch.uint16) if t.dtype == brain else t).numpy() for name, t in tensors.items()}


def in_pieces(
    bits: np.ndarray, dtype: str, numeric: tuple[Numeric, ...], coding: Encoding, pieces: int
) -> dict[str, np.ndarray]:
    """What an `Encoder` makes of a weight that comes in about `pieces` pieces, put together."""
    amax = float(np.abs(cast(bits, dtype, "float32")).max())
    encoder = Encoder(numeric, dtype, bits.shape, coding=coding, amax=amax)
    step = max(len(bits) // pieces // encoder.unit, 1) * encoder.unit
    found = {part: [array] for part, array in encoder.constants().items()}
    for first in range(0, len(bits), step):
        for part, array in encoder.rows(bits[first : first + step], first).items():
            found.setdefault(part, []).append(array.copy())
    return {part: np.concatenate(arrays) if arrays[0].ndim else arrays[0] for part, arrays in found.items()}


def codings(scheme: str) -> list[Encoding]:
    """Every way to spell a scheme that some target asks for, and those between them."""
    packed = {INT4: ("in", "out", "int32"), FP4: ("in", "out"), INT8: ("in", "int32")}
    return [
        Encoding(cast=to, packed=axis, quotient=quotient, scale_dtype=scale)
        for axis in packed.get(SCHEMES[scheme][0].dtype, ("in",))
        for to in ("", "float16", "bfloat16")
        for quotient in ("float32", "weight")
        for scale in ("float32", "bfloat16", "float16")
    ]


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        assert (array.shape, array.dtype) == (theirs[key].shape, theirs[key].dtype), key
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, theirs[key], err_msg=key)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_encode_is_the_reference_in_every_layout(scheme: str, dtype: str) -> None:
    numeric = SCHEMES[scheme]
    bits, w = source(dtype)
    for transpose in (False, True):
        expected = as_numpy(codec_oracle.encode(w, numeric, transpose=transpose))
        assert_same(encode(bits, dtype, numeric, transpose=transpose), expected)
        stored = np.ascontiguousarray(bits.T)  # what a Conv1D's checkpoint holds
        assert_same(encode(stored, dtype, numeric, layout="in_out", transpose=not transpose), expected)


@grid({"scheme": list(SCHEMES), "dtype": list(TORCH)})
def test_every_coding_is_the_reference_and_decodes_to_it(scheme: str, dtype: str) -> None:
    numeric = SCHEMES[scheme]
    for coding, layout, transpose in itertools.product(codings(scheme), ("out_in", "in_out"), (False, True)):
        bits, w = source(dtype, (146, 130) if layout == "in_out" else (130, 146))
        spelt = {"layout": layout, "transpose": transpose, "coding": coding}
        theirs = codec_oracle.encode(w, numeric, **spelt)
        ours = encode(bits, dtype, numeric, **spelt)
        assert_same(ours, as_numpy(theirs))
        values = codec_oracle.decode(theirs, numeric, tuple(w.shape), **spelt).numpy()
        np.testing.assert_array_equal(decode(ours, numeric, w.shape, **spelt), values)


@grid({"scheme": list(SCHEMES), "dtype": list(TORCH)}, fast=[(scheme, "bfloat16") for scheme in SCHEMES])
def test_rows_that_come_in_pieces_become_the_same_bytes(scheme: str, dtype: str) -> None:
    for coding in codings(scheme):
        bits, _ = source(dtype)
        whole = encode(bits, dtype, SCHEMES[scheme], coding=coding)
        for pieces in (1, 2, 9):
            assert_same(in_pieces(bits, dtype, SCHEMES[scheme], coding, pieces), whole)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_takes_the_bytes_of_a_file(scheme: str) -> None:
    bits, _ = source("bfloat16")
    for coding in codings(scheme):
        arrays = encode(bits, "bfloat16", SCHEMES[scheme], coding=coding)
        expected = decode(arrays, SCHEMES[scheme], bits.shape, coding=coding)
        raw = {part: np.frombuffer(array.tobytes(), np.uint8).copy() for part, array in arrays.items()}
        found = decode(raw, SCHEMES[scheme], bits.shape, coding=coding, rows=(128, 256))
        np.testing.assert_array_equal(found, expected[128:256])


def test_a_scale_that_rounds_to_zero_is_the_smallest_number() -> None:
    bits = np.full((2, 4), 2.0**-20, np.float32)
    coding = Encoding(scale_dtype="float16")
    arrays = encode(bits, "float32", SCHEMES["fp8_pc_pt"], coding=coding)
    assert arrays["scale"].dtype == np.float16
    assert (arrays["scale"] == np.float16(2.0**-24)).all()
    np.testing.assert_array_equal(decode(arrays, SCHEMES["fp8_pc_pt"], bits.shape, coding=coding), bits)


def test_an_encoder_says_how_many_rows_a_piece_must_have() -> None:
    units = {
        ("fp8_block", "in"): 128,
        ("int4", "in"): 1,
        ("int4", "out"): 2,
        ("int4", "int32"): 1,
        ("nvfp4", "out"): 2,
        ("int8", "out"): 1,
    }
    for (scheme, packed), unit in units.items():
        assert Encoder(SCHEMES[scheme], "bfloat16", (256, 64), coding=Encoding(packed=packed), amax=1.0).unit == unit


def test_encoders_of_a_thread_share_the_memory_they_are_given() -> None:
    held: dict[str, np.ndarray] = {}

    def take(purpose: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return held.setdefault(purpose, np.empty(shape, dtype))

    bits, _ = source("bfloat16", (64, 256))
    expected = encode(bits, "bfloat16", SCHEMES["int4"])
    for _ in range(2):
        encoder = Encoder(SCHEMES["int4"], "bfloat16", bits.shape, take=take)
        codes = encoder.rows(bits, 0)["codes"]
        assert any(np.shares_memory(codes, memory) for memory in held.values())
        np.testing.assert_array_equal(codes, expected["codes"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_encoder_refuses_the_piece_with_a_bad_number(scheme: str) -> None:
    bits, _ = source("float32", (256, 64))
    bits[131, 5] = np.inf
    encoder = Encoder(SCHEMES[scheme], "float32", bits.shape, amax=1.0, name="up")
    encoder.rows(bits[:128], 0)
    with pytest.raises(SourceError, match=r"up: infinity in 1 block of rows 128 to 256, .* in all"):
        encoder.rows(bits[128:], 128)


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4", "w4a8"])
def test_an_encoder_wants_the_amax_that_no_piece_has(scheme: str) -> None:
    with pytest.raises(SchemeError, match="up: the amax of the whole tensor must be known"):
        Encoder(SCHEMES[scheme], "float32", (4, 128), name="up")


def test_what_is_stored_by_columns_cannot_come_row_by_row() -> None:
    with pytest.raises(SchemeError, match=r"up: a weight that is stored \[in, out\] cannot be coded row by row"):
        Encoder(SCHEMES["int8"], "float32", (4, 128), layout="in_out", name="up")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shapes_are_known_before_a_weight_is_read(scheme: str) -> None:
    numeric = SCHEMES[scheme]
    bits, _ = source("bfloat16")
    for transpose in (False, True):
        promised = stored_shapes(numeric, bits.shape, "out_in", transpose)
        for key, array in encode(bits, "bfloat16", numeric, transpose=transpose).items():
            dtype, shape = promised[key]
            packed = dtype in (INT4, FP4)
            assert array.shape == ((*shape[:-1], shape[-1] // 2) if packed else shape)
            assert array.dtype == STORAGE.get(dtype, dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_is_the_reference_whole_and_in_rows(scheme: str) -> None:
    numeric = SCHEMES[scheme]
    bits, w = source("bfloat16")
    for layout, transpose in (("out_in", False), ("out_in", True), ("in_out", False), ("in_out", True)):
        shape = bits.shape
        expected = codec_oracle.decode(
            codec_oracle.encode(w, numeric, layout=layout), numeric, shape, layout=layout
        ).numpy()
        arrays = encode(bits, "bfloat16", numeric, layout=layout, transpose=transpose)
        theirs = codec_oracle.decode(
            codec_oracle.encode(w, numeric, layout=layout, transpose=transpose),
            numeric,
            shape,
            layout=layout,
            transpose=transpose,
        )
        np.testing.assert_array_equal(theirs.numpy(), expected)
        np.testing.assert_array_equal(decode(arrays, numeric, shape, layout=layout, transpose=transpose), expected)
        part = decode(arrays, numeric, shape, layout=layout, transpose=transpose, rows=(128, 256))
        np.testing.assert_array_equal(part, expected[128:256])


@pytest.mark.parametrize("scheme", ["fp8", "fp8_pc_pt", "int8", "int8_tensor"])
def test_a_convolution_is_a_matrix_of_out_by_the_rest(scheme: str) -> None:
    numeric = SCHEMES[scheme]
    bits, w = source("float32", (12, 7, 3, 5))
    arrays = encode(bits, "float32", numeric, layout="conv")
    assert_same(arrays, as_numpy(codec_oracle.encode(w, numeric, layout="conv")))
    assert arrays["codes"].shape == bits.shape
    assert arrays["scale"].shape == (() if numeric[0].per == "tensor" else (12,))
    expected = codec_oracle.decode(
        codec_oracle.encode(w, numeric, layout="conv"), numeric, bits.shape, layout="conv"
    ).numpy()
    np.testing.assert_array_equal(decode(arrays, numeric, bits.shape, layout="conv"), expected)


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4", "w4a8"])
def test_a_shared_amax_sets_the_scale_of_the_tensor(scheme: str) -> None:
    bits, w = source("bfloat16")
    arrays = encode(bits, "bfloat16", SCHEMES[scheme], transpose=True, amax=123.5)
    assert_same(arrays, as_numpy(codec_oracle.encode(w, SCHEMES[scheme], transpose=True, amax=123.5)))
    bound = 448 * 6 if scheme == "nvfp4" else 448
    assert arrays["scale" if scheme == "fp8" else "scale_2"] == np.float32(123.5) / np.float32(bound)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [0.0, -0.0, "smallest"])
def test_no_scale_is_zero_and_every_code_decodes_to_a_number(scheme: str, dtype: str, value: float | str) -> None:
    tiny = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[dtype]
    bits = cast(np.full((130, 64), tiny if value == "smallest" else value, np.float32), "float32", dtype)
    arrays = encode(bits, dtype, SCHEMES[scheme])
    for key in arrays.keys() - {"codes"}:
        if SCHEMES[scheme][0].scale_dtype != "float8_e8m0fnu":  # its code 0 is 2^-127
            assert (arrays[key] != 0).all()
    values = decode(arrays, SCHEMES[scheme], bits.shape)
    assert np.isfinite(values).all()
    if value != "smallest":
        assert (values == 0).all()
        assert arrays["scale_2" if scheme in ("w4a8", "nvfp4") else "scale"].ravel()[0] in (0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_that_is_not_finite_is_refused_by_name(scheme: str, bad: float) -> None:
    bits, _ = source("float32")
    bits[300, 17] = bad
    kind = f"{'NaN' if math.isnan(bad) else 'infinity'} in 1 block of [^;]* in all"
    remedy = "repair the checkpoint, or get it again$"
    with pytest.raises(SourceError, match=f"model.layers.0.up_proj.weight: {kind}.*{remedy}"):
        encode(bits, "float32", SCHEMES[scheme], name="model.layers.0.up_proj.weight")


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4", "w4a8"])
def test_a_shared_amax_that_is_not_finite_is_refused(scheme: str) -> None:
    bits, _ = source("float32")
    with pytest.raises(SourceError, match="NaN"):
        encode(bits, "float32", SCHEMES[scheme], amax=math.nan)


@pytest.mark.parametrize(
    ("scheme", "shape", "layout", "transpose", "message"),
    [
        ("int4", (8, 9), "out_in", False, "w: int4 packs two values to a byte .* odd"),
        ("int4", (9, 8), "out_in", True, "w: int4 packs two values to a byte .* odd"),
        ("int4", (8, 4, 3, 3), "conv", False, "layout 'conv' cannot have one scale per block"),
        ("fp8", (8, 4, 3, 3), "conv", True, "w: a convolution of shape .* cannot be stored transposed"),
        ("fp8", (8, 4, 3), "out_in", False, "w: a weight of shape .* cannot be quantized"),
        ("fp8", (8,), "out_in", False, "w: a weight of shape .* cannot be quantized"),
        ("fp8", (0, 8), "out_in", False, "w: a weight of shape .* cannot be quantized"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    scheme: str, shape: tuple[int, ...], layout: str, transpose: bool, message: str
) -> None:
    with pytest.raises(SchemeError, match=message):
        encode(np.ones(shape, np.float32), "float32", SCHEMES[scheme], layout=layout, transpose=transpose, name="w")


@pytest.mark.parametrize(
    ("scheme", "packed", "shape", "message"),
    [
        ("int4", "out", (9, 8), "w: int4 packs two values to a byte along axis 0 of .* odd"),
        ("nvfp4", "int32", (8, 16), "w: float4_e2m1fn codes are not stored in int32; known: int4, int8"),
    ],
)
def test_a_packing_that_does_not_fit_is_refused(scheme: str, packed: str, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        encode(np.ones(shape, np.float32), "float32", SCHEMES[scheme], coding=Encoding(packed=packed), name="w")


def test_two_threads_and_read_only_input_give_the_same_bytes() -> None:
    bits, _ = source("bfloat16", (700, 512))
    bits.flags.writeable = False
    expected = encode(bits, "bfloat16", SCHEMES["int4"], transpose=True)
    found: list[dict[str, np.ndarray]] = []
    work = lambda: found.append(encode(bits, "bfloat16", SCHEMES["int4"], transpose=True))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for arrays in found:
        assert_same(arrays, expected)
    assert len(found) == 2


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_parity_sees_what_a_float64_comparison_sees(scheme: str, layout: str) -> None:
    numeric = SCHEMES[scheme]
    bits, w = source("bfloat16")
    arrays = encode(bits, "bfloat16", numeric, layout=layout, transpose=True)
    found = compare(bits, "bfloat16", arrays, numeric, layout=layout, transpose=True)
    a = w.double().numpy()
    b = decode(arrays, numeric, bits.shape, layout=layout, transpose=True).astype(np.float64)
    expected = [(a * b).sum(), (a * a).sum(), (b * b).sum(), ((a - b) ** 2).sum()]
    np.testing.assert_allclose([found.dot, found.source, found.decoded, found.error], expected, rtol=1e-6)
    assert found.cosine == pytest.approx(expected[0] / math.sqrt(expected[1] * expected[2]))
    assert found.sqnr == pytest.approx(10 * math.log10(expected[1] / expected[3]))
    assert found == compare(bits, "bfloat16", arrays, numeric, layout=layout, transpose=True)


def test_parity_names_the_worst_block_and_the_dropped_scale() -> None:
    values = np.ones((4, 256), np.float32)
    values[2, 128:] = np.linspace(1, 2, 128)
    arrays = encode(values, "float32", SCHEMES["int4"])
    whole = compare(values, "float32", arrays, SCHEMES["int4"])
    block = decode(arrays, SCHEMES["int4"], (4, 256))[2, 128:].astype(np.float64)
    alone = np.linalg.norm(block - values[2, 128:]) / np.linalg.norm(values[2, 128:].astype(np.float64))
    assert whole.worst == pytest.approx(alone)
    arrays = encode(values, "float32", SCHEMES["fp8"])
    dropped = compare(values, "float32", arrays | {"scale": np.ones_like(arrays["scale"])}, SCHEMES["fp8"])
    assert dropped.cosine > 0.99
    assert dropped.norm_ratio == pytest.approx(448 / 2, rel=0.01)


def test_parity_of_nothing_is_perfect_and_of_something_for_nothing_is_not() -> None:
    zero = np.zeros((2, 4), np.float32)
    arrays = encode(zero, "float32", SCHEMES["fp8"])
    nothing = compare(zero, "float32", arrays, SCHEMES["fp8"])
    assert (nothing.cosine, nothing.norm_ratio, nothing.sqnr, nothing.worst) == (1.0, 1.0, math.inf, 0.0)
    wrong = compare(zero, "float32", arrays | {"codes": np.full((2, 4), 0x38, np.uint8)}, SCHEMES["fp8"])
    assert (wrong.cosine, wrong.norm_ratio, wrong.sqnr, wrong.worst) == (0.0, math.inf, -math.inf, math.inf)


@settings(max_examples=40, deadline=None)
@given(
    scheme=st.sampled_from(sorted(SCHEMES)),
    rows=st.integers(1, 40).map(lambda n: 2 * n),
    cols=st.integers(1, 150).map(lambda n: 2 * n),
    seed=st.integers(0, 2**16),
    transpose=st.booleans(),
)
def test_random_shapes_and_bits_give_the_reference_bytes(
    scheme: str, rows: int, cols: int, seed: int, transpose: bool
) -> None:
    bits = np.random.default_rng(seed).integers(0, 65536, (rows, cols)).astype(np.uint16)
    bits[bits & 0x7F80 == 0x7F80] &= 0xBFFF  # no NaN, no infinity; all other magnitudes, subnormals included
    w = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    ours = encode(bits, "bfloat16", SCHEMES[scheme], transpose=transpose)
    assert_same(ours, as_numpy(codec_oracle.encode(w, SCHEMES[scheme], transpose=transpose)))


def test_an_encoder_is_gone_when_nobody_holds_it() -> None:
    """A cycle would keep its buffers, a megabyte or two each, until garbage is collected: hundreds of them."""
    encoder = Encoder((Numeric(INT8, "channel"),), "float32", (4, 6))
    encoder.rows(np.ones((4, 6), np.float32), 0)
    held = weakref.ref(encoder)
    del encoder
    assert held() is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_codes_are_chosen_with_a_scale_that_is_rounded_up_where_it_is_subnormal(dtype: str) -> None:
    values = np.random.default_rng(4).standard_normal((8, 64)).astype(np.float32)
    values[3:] *= np.float32(2.0**-14) if dtype == "float16" else np.float32(2.0**-127)
    coding = Encoding(scale_dtype=dtype, round_up=True)
    made = encode(values, "float32", (Numeric(INT4, "block", (16,)),), coding=coding)
    scale = torch.from_numpy(values).reshape(8, 4, 16).abs().amax(-1).clamp(min=2.0**-126) / 7
    kind, stored = TORCH[dtype], torch.from_numpy(made["scale"].copy()).view(TORCH[dtype])
    tiny = torch.finfo(kind).tiny
    above = scale >= tiny
    assert torch.equal(stored[above], scale[above].to(kind)) and 0 < int(above.sum()) < above.numel()
    step = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    assert torch.equal(stored[~above].float(), (scale[~above] / step).ceil().clamp(min=1) * step)
    codes = (torch.from_numpy(values).reshape(8, 4, 16) / stored.float()[..., None]).round().clamp(-8, 7)
    packed = torch.from_numpy(made["codes"].copy()).reshape(8, 4, 8)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).reshape(8, 4, 16).to(torch.int8)
    assert torch.equal(torch.where(nibbles > 7, nibbles - 16, nibbles), codes.to(torch.int8))
