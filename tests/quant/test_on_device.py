"""Codes that are made on a device are those of the CPU's kernels, byte for byte.

Plain torch runs here on the CPU, where only tests ask for it. Triton's kernels: tests/kernels/test_gpu_codes.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bridge.compat import fp8_casts
from bridge.core.errors import SourceError
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec import on_device, torch_codes
from bridge.quant.codec.on_device import HOST, TORCH, TRITON, Checks, best_way, encode
from tests.kernels.gpu_cases import CODINGS, DTYPES, SCHEMES, as_bits, casts, same_bytes, weight

SHAPES = [(130, 146), (256, 384), (6, 16)]


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "best_way", lambda tensor: TORCH)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_plain_torch_gives_the_bytes_of_the_kernels(scheme: str, dtype: str, in_torch: None) -> None:
    for shape in SHAPES if dtype == "bfloat16" else SHAPES[:1]:
        w = weight(shape, dtype)
        for coding in CODINGS[scheme]:
            same_bytes(encode(w, SCHEMES[scheme], coding=coding), w, SCHEMES[scheme], coding=coding)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transposed_weights_have_the_bytes_of_the_kernels(scheme: str, in_torch: None) -> None:
    for layout, transpose in (("in_out", False), ("in_out", True), ("out_in", True)):
        w = weight((160, 224), "bfloat16")
        for packed in ("in", "int32") if SCHEMES[scheme][0].dtype in ("int4", "int8") else ("in",):
            spelt: dict[str, Any] = {"layout": layout, "transpose": transpose, "coding": Encoding(packed=packed)}
            same_bytes(encode(w, SCHEMES[scheme], **spelt), w, SCHEMES[scheme], **spelt)


@pytest.mark.parametrize("size", [0.0, 1e-44, 3e38])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_at_the_ends_of_float32(scheme: str, size: float, in_torch: None) -> None:
    for dtype in ("bfloat16", "float32"):
        w = (weight((8, 256), "float32").clamp(-1, 1) * size).to(getattr(torch, dtype))
        for coding in CODINGS[scheme]:
            if size > 1 and coding.reciprocal and coding.scale_dtype == "float16":
                continue  # which has no number for 1 / amax
            same_bytes(encode(w, SCHEMES[scheme], coding=coding), w, SCHEMES[scheme], coding=coding)


@pytest.mark.parametrize("scheme", ["fp8", "w4a8", "nvfp4"])
def test_weights_that_share_a_scale(scheme: str, in_torch: None) -> None:
    w = weight((8, 256), "bfloat16")
    own, shared = (encode(w, SCHEMES[scheme], amax=amax) for amax in (None, torch.tensor(500.0)))
    same_bytes(shared, w, SCHEMES[scheme], amax=500.0)
    same_bytes(encode(w, SCHEMES[scheme], amax=500.0), w, SCHEMES[scheme], amax=500.0)
    part = "scale" if scheme == "fp8" else "scale_2"
    assert not torch.equal(own[part], shared[part])


def test_chunks_do_not_show(in_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight((300, 146), "float16")
    monkeypatch.setattr(torch_codes, "AT_ONCE", 1000)
    for scheme, numeric in SCHEMES.items():
        for coding in CODINGS[scheme][-2:]:
            same_bytes(encode(w, numeric, coding=coding), w, numeric, coding=coding)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_value_that_is_no_number_is_refused(scheme: str, bad: float, in_torch: None) -> None:
    w = weight((130, 256), "bfloat16")
    w[129, 200] = bad
    with pytest.raises(SourceError, match=r"layers\.0: holds NaN or infinity"):
        encode(w, SCHEMES[scheme], name="layers.0")
    with pytest.raises(SourceError, match=r"layers\.0: holds NaN or infinity"):
        encode(w, SCHEMES[scheme], name="layers.0", amax=3.0)
    checks = Checks()
    encode(w, SCHEMES[scheme], name="layers.1.q", checks=checks)
    encode(weight((8, 256), "bfloat16"), SCHEMES[scheme], name="layers.2.q", checks=checks)
    with pytest.raises(SourceError, match=r"^layers\.1\.q: holds"):
        checks.check()
    checks.check()  # of nothing


def test_an_amax_that_is_no_number_is_refused(in_torch: None) -> None:
    for amax in (float("nan"), torch.tensor(float("inf"))):
        with pytest.raises(SourceError, match="given amax"):
            encode(torch.ones(2, 4), SCHEMES["fp8"], amax=amax)


def test_a_tensor_of_the_cpu_and_a_searched_format_take_the_kernels_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert best_way(torch.ones(3)) == HOST
    w, numeric = weight((8, 256), "float16"), (Numeric("int4", "block", (128,), search="mse"),)
    same_bytes(encode(w, numeric), w, numeric)
    same_bytes(encode(w, SCHEMES["nvfp4"]), w, SCHEMES["nvfp4"])
    monkeypatch.setattr(on_device, "best_way", lambda tensor: TORCH)
    same_bytes(encode(w, numeric), w, numeric)
    awq = Encoding(packed="awq", scale_dtype="float16")
    same_bytes(encode(w, SCHEMES["int4"], coding=awq), w, SCHEMES["int4"], coding=awq)


@pytest.mark.parametrize(
    ("device", "capability", "triton", "way"),
    [
        ("cuda", (9, 0), object(), TRITON),
        ("cuda", (7, 5), object(), TORCH),
        ("cuda", (9, 0), None, TORCH),
        ("xpu", (0, 0), object(), TORCH),
        ("mps", (0, 0), object(), HOST),
        ("meta", (0, 0), object(), HOST),
    ],
)
def test_the_device_decides(
    device: str, capability: tuple[int, int], triton: object, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(on_device, "find_spec", lambda name: triton)
    assert best_way(SimpleNamespace(device=SimpleNamespace(type=device))) == way  # type: ignore[arg-type]


def test_a_parameter_is_encoded_where_it_lies_and_stays_as_it_is(in_torch: None) -> None:
    of_training = torch.nn.Parameter(weight((128, 256), "bfloat16").T)
    before = of_training.detach().clone()
    parts = encode(of_training, SCHEMES["mxfp8"])
    same_bytes(parts, before.contiguous(), SCHEMES["mxfp8"])
    assert torch.equal(of_training, before) and not any(part.requires_grad for part in parts.values())
    assert [part.dtype for part in parts.values()] == [torch.float8_e8m0fnu, torch.float8_e4m3fn]


def test_a_dtype_that_is_not_a_models_is_refused() -> None:
    with pytest.raises(SourceError, match="x: a weight of dtype float64 cannot be quantized"):
        encode(torch.ones(2, 4, dtype=torch.float64), SCHEMES["fp8"], name="x")


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_by_groups_have_the_bytes_of_the_kernels(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in SHAPES:
        w = weight(shape, dtype)
        wanted = casts(w)
        with monkeypatch.context() as patched:
            patched.setattr(fp8_casts, "best_way", lambda tensor: TORCH)
            patched.setattr(on_device, "best_way", lambda tensor: TORCH)
            for ours, theirs in zip(casts(w), wanted, strict=True):
                assert ours.dtype == theirs.dtype and (as_bits(ours) == as_bits(theirs)).all()


def test_casts_of_a_value_that_is_no_number_are_refused(monkeypatch: pytest.MonkeyPatch, in_torch: None) -> None:
    monkeypatch.setattr(fp8_casts, "best_way", lambda tensor: TORCH)
    w = weight((130, 146), "bfloat16")
    w[129, 140] = float("inf")
    with pytest.raises(SourceError, match="x: holds NaN or infinity"):
        casts(w)
