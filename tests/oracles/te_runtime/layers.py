"""What `te.LayerNormLinear`, `te.LayerNormMLP` and attention call beside casts and GEMMs, in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu as plain_gelu

aten = torch.ops.aten


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, _: Any, margin: int, centered: bool
) -> tuple[Any, Tensor, Tensor]:
    """The normalized rows, quantized where a quantizer is given, their means and their inverse deviations."""
    made, mean, inverse = aten.native_layer_norm(x, x.shape[-1:], weight + 1 if centered else weight, bias, eps)
    made = _quantized(made, quantizer)
    return (made if out is None else out.copy_(made)), mean.flatten(), inverse.flatten()


def layernorm_bwd(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, margin: int, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the rows, the weight and the bias."""
    weight = weight + 1 if centered else weight
    found: tuple[Tensor, Tensor, Tensor] = aten.native_layer_norm_backward(
        gradient.reshape(x.shape), x, x.shape[-1:], mean[:, None], inverse[:, None], weight, weight, [True] * 3
    )
    return found


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, _: Any, margin: int, centered: bool
) -> tuple[Any, None, Tensor]:
    """The normalized rows, quantized where a quantizer is given, and what they were multiplied by."""
    made, inverse = aten._fused_rms_norm(x, x.shape[-1:], weight + 1 if centered else weight, eps)
    made = _quantized(made, quantizer)
    return (made if out is None else out.copy_(made)), None, inverse.flatten()


def rmsnorm_bwd(
    gradient: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, margin: int, centered: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and the weight."""
    weight = weight + 1 if centered else weight
    found: tuple[Tensor, Tensor] = aten._fused_rms_norm_backward(
        gradient.reshape(x.shape), x, x.shape[-1:], inverse[:, None], weight, [True] * 2
    )
    return found


def gelu(x: Tensor, quantizer: Any) -> Any:
    return _quantized(plain_gelu(x, approximate="tanh"), quantizer)


def dgelu(gradient: Tensor, x: Tensor, quantizer: Any) -> Any:
    return _quantized(aten.gelu_backward(gradient, x, approximate="tanh"), quantizer)


def dbias_dgelu(gradient: Tensor, x: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The gradient of the bias before gelu, and the quantized gradient."""
    made = dgelu(gradient, x, None)
    return made.reshape(-1, made.shape[-1]).sum(0), quantizer(made)


def _quantized(tensor: Tensor, quantizer: Any) -> Any:
    return tensor if quantizer is None else quantizer(tensor)
