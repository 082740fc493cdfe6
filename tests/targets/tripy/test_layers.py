"""Each layer alone does what ModelOpt's, torch's or transformers' layer does to the same input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from bridge.core.errors import PlanError
from bridge.targets.tripy.section import Entry, Section
from tests.targets.tripy.models import config, relative

OUT, IN = 24, 40
TOLERANCE = 1e-6  # relative L2: sums of 40 float32 products in another order


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def out(tensor: Any) -> torch.Tensor:
    return torch.from_dlpack(tensor).cpu()


def scales(weight: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Scales of a weight [out, in] as `entry` has them: a value, one an `out`, or [out, in / block]."""
    bound = {"int8": 127.0, "int4": 7.0, "float8": 448.0}[entry.quant_dtype]
    if entry.block:
        return weight.abs().unflatten(1, (-1, entry.block)).amax(-1) / bound
    return (weight.abs().amax(1) if entry.weight_quant_dim == 0 else weight.abs().max()) / bound


def fake(x: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Quantized and back; torch rounds and casts."""
    if dtype == "float8":
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    bound = {"int8": 128, "int4": 8}[dtype]
    return (x / scale).round().clamp(-bound, bound - 1) * scale


@pytest.mark.parametrize(
    "entry",
    [
        Entry("int8", 0, "out_in", None, False, False),
        Entry("int8", 0, "out_in", None, True, True),
        Entry("float8", None, "out_in", None, True, False),
        Entry("int4", None, "in_out", 8, False, False),
        Entry("int4", None, "in_out", 8, False, True),
    ],
    ids=["int8", "int8 smoothed", "float8", "int4", "int4 awq"],
)
def test_quantized_linear_multiplies_what_its_codes_stand_for(entry: Entry, tp: Any) -> None:
    from bridge.targets.tripy.models.layers import Parts

    weight, bias, x, smooth = made(OUT, IN), made(OUT, seed=1), made(3, 5, IN, seed=2), made(IN, seed=3).abs() + 0.5
    scale = scales(weight, entry)
    state = {"weight": weight, "bias": bias, "weight_scale": scale}
    each = scale.repeat_interleave(entry.block, 1) if entry.block else scale[..., None] if scale.ndim else scale
    wanted = fake(weight, each, entry.quant_dtype)
    if entry.layout == "in_out":
        state |= {"weight": weight.T.contiguous(), "weight_scale": scale.T.contiguous()}
    smoothed = x * smooth if entry.pre_quant_scale else x
    if entry.pre_quant_scale:
        state["pre_quant_scale"] = smooth
    if entry.input_scale:
        state["input_scale"] = smoothed.abs().max() / (448 if entry.quant_dtype == "float8" else 127)
        smoothed = fake(smoothed, state["input_scale"], entry.quant_dtype)
    layer = Parts(Section("float32", True, {"fc": entry}, {})).linear("fc", IN, OUT)
    layer.load_state_dict({name: tp.Tensor(tensor) for name, tensor in state.items()})
    found = out(layer(tp.Tensor(x)))
    assert found.shape == (3, 5, OUT)
    assert relative(found, smoothed @ wanted.T + bias) <= TOLERANCE


def test_linear_without_an_entry_is_tripys_own(tp: Any) -> None:
    from bridge.targets.tripy.models.layers import Parts

    layer = Parts(Section("bfloat16", False, {}, {})).linear("fc", IN, OUT, bias=False)
    assert type(layer) is tp.Linear and layer.bias is None and layer.weight.shape == (OUT, IN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_is_llamas(dtype: torch.dtype, tp: Any) -> None:
    from bridge.targets.tripy.models.layers import RMSNorm

    theirs = LlamaRMSNorm(IN, 1e-3).to(dtype)
    theirs.weight.data, x = made(IN).to(dtype), made(2, 3, IN, seed=1).to(dtype)
    ours = RMSNorm(IN, 1e-3, getattr(tp, str(dtype).removeprefix("torch.")))
    ours.load_state_dict({"weight": tp.Tensor(theirs.weight.data)})
    # Roots differ in the last bits of float32, and may then round to the half's other neighbour.
    tolerance = max(torch.finfo(dtype).eps, 5e-7)
    torch.testing.assert_close(out(ours(tp.Tensor(x))), theirs(x).detach(), rtol=tolerance, atol=1e-7)


def test_activations_are_transformers(tp: Any) -> None:
    from bridge.targets.tripy.models.layers import ACTIVATIONS, activation

    x = torch.linspace(-8, 8, 97)[None]
    for name in ACTIVATIONS:
        torch.testing.assert_close(out(activation(name)(tp.Tensor(x))), ACT2FN[name](x), rtol=1e-6, atol=1e-6)
    with pytest.raises(PlanError, match="no Tripy activation for 'mish'; known: gelu, "):
        activation("mish")


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 24},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotation_is_llamas(kind: str, tp: Any, tmp_path: Path) -> None:
    from bridge.targets.tripy.models.llama import Rotary, rotate

    described = config("llama")
    described.rope_parameters = {"rope_type": kind, "rope_theta": 5000.0, **ROPES[kind]}
    x, length = made(2, 6, 80, described.head_dim), 80
    cos, sin = LlamaRotaryEmbedding(described)(x, torch.arange(length)[None])
    wanted, _ = apply_rotary_pos_emb(x, x, cos, sin)
    found = rotate(tp.Tensor(x), Rotary(described).tables(length))
    # float32 angles of up to 80 radians: their last bit is 8e-6
    torch.testing.assert_close(out(found), wanted, rtol=0, atol=3e-5)
