"""Layers with an input of their own beside the residual stream, as formulas over roles: Gemma 4."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.tables.reference_forward import ACTIVATIONS, Formulas, Roles, _even, _gated, _linear, _norm


def states_of_layers(roles: Roles, f: Formulas, ids: Tensor) -> Tensor:
    """Return what the final norm gives: attention that may reuse keys and values, an MLP with experts beside it."""
    x = roles["embed.tokens.weight", None, None][ids] * f.embedding_scale
    inputs = _layer_inputs(roles, f, ids, x)
    kept: dict[float, tuple[Tensor, Tensor]] = {}  # by RoPE's base, which kinds of layers have of their own
    for layer in range(f.layers):
        y = _attention(roles, f, layer, _norm(roles, "attn.norm", layer, x, f), kept)
        x = x + _norm(roles, "attn.post_norm", layer, y, f)
        y = _gated(roles, f, "mlp", layer, _norm(roles, "mlp.norm", layer, x, f))
        if ("moe.router.weight", layer, None) in roles:
            routed = _norm(roles, "moe.post_norm", layer, _experts(roles, f, layer, x), f)
            y = _norm(roles, "mlp.out_norm", layer, y, f) + routed
        x = x + _norm(roles, "mlp.post_norm", layer, y, f)
        if inputs is not None:
            gate = ACTIVATIONS[f.activation](_linear(roles, "ple.layer.gate", layer, x))
            y = _linear(roles, "ple.layer.o", layer, gate * inputs[:, layer])
            x = x + _norm(roles, "ple.layer.norm", layer, y, f)
        x = x * roles["layer.scale", layer, None]
    return _norm(roles, "final.norm", None, x, f)


def _layer_inputs(roles: Roles, f: Formulas, ids: Tensor, x: Tensor) -> Tensor | None:
    """Positions, layers, width: what a token has for each layer, and a part of its embedding."""
    table = roles.get(("ple.embed.weight", None, None))
    if table is None:
        return None
    own = table[ids].unflatten(1, (f.layers, -1))
    part = (_linear(roles, "ple.proj", None, x) / math.sqrt(x.shape[1])).unflatten(1, (f.layers, -1))
    return (_norm(roles, "ple.norm", None, part, f) + own * math.sqrt(own.shape[2])) / math.sqrt(2)


def _attention(roles: Roles, f: Formulas, layer: int, x: Tensor, kept: dict[float, tuple[Tensor, Tensor]]) -> Tensor:
    def heads(role: str, width: int) -> Tensor:
        return _linear(roles, role, layer, x).view(len(x), -1, width).transpose(0, 1)  # heads, positions, width

    width = len(roles["attn.q_norm.weight", layer, None])
    q = _turned(_norm(roles, "attn.q_norm", layer, heads("attn.q", width), f), f, layer)
    alike = ("attn.kv.weight", layer, None) in roles
    if alike or ("attn.k.weight", layer, None) in roles:
        k = heads("attn.kv" if alike else "attn.k", width)
        v = _even(k if alike else heads("attn.v_even", width), f.eps)
        kept[f.theta[layer]] = _turned(_norm(roles, "attn.k_norm", layer, k, f), f, layer), v
    k, v = (y.repeat_interleave(len(q) // len(y), 0) for y in kept[f.theta[layer]])
    behind = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
    hidden = (behind < 0) | (behind >= (f.window[layer] or len(x)))
    y = (q @ k.transpose(1, 2)).masked_fill(hidden, -math.inf).softmax(-1) @ v
    return _linear(roles, "attn.o", layer, y.transpose(0, 1).reshape(len(x), -1))


def _turned(x: Tensor, f: Formulas, layer: int) -> Tensor:
    """RoPE in halves of the whole head; without a window a quarter of the pairs turns, at a whole head's rates."""
    half = x.shape[-1] // 2
    turning = half if f.window[layer] else int(0.25 * x.shape[-1] // 2)
    rate = f.theta[layer] ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * rate * (torch.arange(half) < turning)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def _experts(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    read = _even(x, f.eps) * roles["moe.router.norm.weight", layer, None] / math.sqrt(x.shape[1])
    shares, chosen = _linear(roles, "moe.router", layer, read).softmax(-1).topk(f.top_k)
    shares = shares / shares.sum(-1, keepdim=True) * roles["moe.router.share_scale", layer, None][chosen]
    x, out = _norm(roles, "moe.norm", layer, x, f), torch.zeros_like(x)
    for at in range(len(x)):
        for share, expert in zip(shares[at], chosen[at].tolist(), strict=True):
            out[at] += share * _gated(roles, f, "moe", layer, x[at : at + 1], expert)[0]
    return out
