"""What formats make of a float32 tensor, in torch alone, and configs that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Quantize = Callable[[Any], Any]


def fp8(code: Any) -> Quantize:
    """Transformer Engine's: one scale that multiplies."""
    bound = torch.finfo(code).max

    def quantize(x: Any) -> Any:
        factor = bound / x.abs().max()
        return (x * factor).clamp(-bound, bound).to(code).float() * (1 / factor)

    return quantize


def mx(code: Any) -> Quantize:
    bound = torch.finfo(code).max

    def quantize(x: Any) -> Any:
        blocks = x.reshape(-1, 32)
        scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(1, keepdim=True).double() / bound))).float()
        return ((blocks / scale).clamp(-bound, bound).to(code).float() * scale).reshape(x.shape)

    return quantize


def divided(largest: Callable[[Any], Any], code: Callable[[Any], Any], bound: float) -> Quantize:
    """ModelOpt's: a scale amax / bound that divides."""

    def quantize(x: Any) -> Any:
        scale = largest(x) / bound
        return code(x / scale) * scale

    return quantize


def whole(x: Any) -> Any:
    return x.abs().max()


def by_row(x: Any) -> Any:
    return x.abs().amax(-1, keepdim=True)


def e4m3(x: Any) -> Any:
    return x.clamp(-448, 448).to(E4M3).float()


def int8(x: Any) -> Any:
    return x.round().clamp(-128, 127)


def int4_blocks(x: Any) -> Any:
    blocks = x.reshape(-1, 128)
    return divided(by_row, lambda c: c.round().clamp(-8, 7), 7)(blocks).reshape(x.shape)


def nvfp4(x: Any) -> Any:
    blocks, above = x.reshape(-1, 16), x.abs().max() / (6 * 448)
    scale = (by_row(blocks) / (6 * above)).clamp(2**-9, 448).to(E4M3).float() * above
    distance = ((blocks / scale).abs()[..., None] - FP4).abs().double()
    nearest = (distance + 1e-12 * torch.tensor([0, 1] * 4)).argmin(-1)  # of two, the even code
    return (blocks.sign() * FP4[nearest] * scale).reshape(x.shape)


def same(x: Any) -> Any:
    return x


def fake(gemms: dict[str, list[str]], **options: Any) -> dict[str, Any]:
    entries = [{"gemm": gemm, "tensors": names} for gemm, names in gemms.items()]
    return {"FakeQuant": {"enabled": True, "gemms_struct": entries, **options}}


def config(features: dict[str, Any], layers: Any = None) -> dict[str, Any]:
    return {"s": {"enabled": True, "layers": layers or {"layer_types": ["all"]}, "transformer_engine": features}}


def stats(*tensors: str, name: str = "rms", **schedule: Any) -> dict[str, Any]:
    return {"LogTensorStats": {"enabled": True, "tensors": [*tensors], "stats": [name], **schedule}}


def disable(*gemms: str) -> dict[str, Any]:
    if not gemms:
        return {"DisableQuantizationLayer": {"enabled": True}}
    return {"DisableFP8GEMM": {"enabled": True, "gemms": [*gemms]}}


def equal(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
