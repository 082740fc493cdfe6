"""Stand-ins for vLLM's compiled quantization of activations, and for its attention with a cache.

They compute in float32, so that only quantization can differ from a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_LEAST_SCALE = 1 / (FP8_MAX * 512)  # of csrc/quantization/w8a8/fp8: no token has a smaller one
INT8_MAX = 127


def static_fp8(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, group_shape: Any = None) -> None:
    out.copy_((x.float() / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8))


def dynamic_fp8(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
    scale.copy_((x.float().abs().max() / FP8_MAX).reshape(scale.shape))
    static_fp8(out, x, scale)


def fp8_per_token(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, scale_ub: Any = None) -> None:
    scale.copy_((x.float().abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=FP8_LEAST_SCALE))
    static_fp8(out, x, scale)


def silu_mul_fp8(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    static_fp8(out, torch.nn.functional.silu(x[..., :half]) * x[..., half:], scale)


def fake_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    return ((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale).to(x.dtype)


def int8(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale: the one of a file, or one a token."""
    if scale is None:
        scale = (x.float().abs().amax(-1, keepdim=True) / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).round().clamp(-INT8_MAX - 1, INT8_MAX), scale


def attention(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output_shape: Any = None, **_: Any
) -> torch.Tensor:
    """One prompt, causal, with a cache that is only quantized; windows must be longer than the prompt."""
    tokens = query.shape[0]
    q, k, v = (part.reshape(tokens, -1, self.head_size).transpose(0, 1) for part in (query, key, value))
    if "fp8" in str(self.kv_cache_dtype):
        k, v = fake_fp8(k, float(self._k_scale)), fake_fp8(v, float(self._v_scale))
    scale = getattr(self.impl, "scale", None)
    attended = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
    )[0]
    return attended.transpose(0, 1).reshape(tokens, -1)


OPERATORS: dict[str, Callable[..., None]] = {
    "static_scaled_fp8_quant(Tensor! out, Tensor x, Tensor scale, int[]? group_shape=None) -> ()": static_fp8,
    "dynamic_scaled_fp8_quant(Tensor! out, Tensor x, Tensor! scale) -> ()": dynamic_fp8,
    "dynamic_per_token_scaled_fp8_quant(Tensor! out, Tensor x, Tensor! scale, Tensor? ub=None) -> ()": fp8_per_token,
    "silu_and_mul_quant(Tensor! out, Tensor x, Tensor scale) -> ()": silu_mul_fp8,
}


def install() -> None:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    # vLLM's own needs AVX-512; the attention below does not
    CPUAttentionBackend.supports_kv_cache_dtype = classmethod(lambda *_: True)
    library = torch.library.Library("_C", "FRAGMENT")
    for signature, call in OPERATORS.items():
        library.define(signature)
        library.impl(signature.partition("(")[0], call, "CPU")
    install.library = library  # type: ignore[attr-defined]  # the operators live as long as it does
    Attention.forward = attention
