"""DeepSeek-V4 as formulas over roles: residual streams, and attention to compressed keys."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.tables.reference_forward import Formulas, Roles, _even, _experts, _linear, _norm


def states_of_streams(roles: Roles, f: Formulas, ids: Tensor) -> Tensor:
    """Return what the final norm gives, of blocks that read a mix of residual streams; positions, hidden."""
    weight = roles["final.mix.weight", None, None]
    streams = roles["embed.tokens.weight", None, None][ids][:, None].expand(
        -1, len(weight), -1
    )  # positions, streams, hidden
    for layer in range(f.layers):
        shares, kept, y = _mixed(roles, f, "attn.mix", layer, streams)
        y = _compressed_attention(roles, f, layer, _norm(roles, "attn.norm", layer, y, f))
        streams = shares[..., None] * y[:, None] + kept.transpose(1, 2) @ streams
        shares, kept, y = _mixed(roles, f, "mlp.mix", layer, streams)
        table = roles.get(("moe.router.table", layer, None))
        routed = f if table is None else replace(f, given=table[ids].long())
        y = _experts(roles, routed, layer, _norm(roles, "mlp.norm", layer, y, f))
        streams = shares[..., None] * y[:, None] + kept.transpose(1, 2) @ streams
    bias, scale = roles["final.mix.bias", None, None], roles["final.mix.scale", None, None]
    read = (_even(streams.flatten(1), f.eps) @ weight.T * scale + bias).sigmoid() + f.sinkhorn[1]
    return _norm(roles, "final.norm", None, (read[..., None] * streams).sum(1), f)


def _mixed(roles: Roles, f: Formulas, role: str, layer: int, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shares of each stream in a block's output, of each stream in each other, and what the block reads."""
    n, (rounds, least) = streams.shape[1], f.sinkhorn
    each = (_even(streams.flatten(1), f.eps) @ roles[f"{role}.weight", layer, None].T).split([n, n, n * n], -1)
    biases = roles[f"{role}.bias", layer, None].split([n, n, n * n])
    read, wrote, kept = (
        x * scale + bias for x, scale, bias in zip(each, roles[f"{role}.scale", layer, None], biases, strict=True)
    )
    kept = kept.unflatten(-1, (n, n)).softmax(-1) + least
    kept = kept / (kept.sum(-2, keepdim=True) + least)
    for _ in range(rounds - 1):
        kept = kept / (kept.sum(-1, keepdim=True) + least)
        kept = kept / (kept.sum(-2, keepdim=True) + least)
    return 2 * wrote.sigmoid(), kept, ((read.sigmoid() + least)[..., None] * streams).sum(1)


def _compressed_attention(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    """One key for all heads, which is their value too: of the window's positions, and of spans of positions before."""
    length, at = len(x), torch.arange(len(x))
    latent = _norm(roles, "mqa.q_a_norm", layer, _linear(roles, "mqa.q_a", layer, x), f)
    q = _even(_linear(roles, "mqa.q_b", layer, latent).view(length, f.heads, -1).transpose(0, 1), f.eps)
    q = _turned(q, f, layer, at)  # heads, positions, head_dim
    k = _turned(_norm(roles, "mqa.kv_norm", layer, _linear(roles, "mqa.kv", layer, x), f), f, layer, at)
    behind = at[:, None] - at[None, :]
    hidden = (behind < 0) | (behind >= f.window[layer])
    for kind in ("dense", "sparse"):
        if (f"mqa.{kind}.kv.weight", layer, None) in roles:
            spans, unseen = _spans(roles, f, f"mqa.{kind}", layer, x)
            k = torch.cat([k, spans])
            hidden = torch.cat([hidden, unseen if kind == "dense" else _unchosen(roles, f, layer, x, latent)], -1)
    scores = (q @ k.T / math.sqrt(k.shape[-1])).masked_fill(hidden, -math.inf)
    sink = roles["attn.sink.bias", layer, None][:, None, None].expand(-1, length, 1)
    y = _turned(torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ k, f, layer, -at)
    weight = roles["mqa.o_a.weight", layer, None]
    y = y.transpose(0, 1).reshape(length, -1, weight.shape[1])  # positions, groups, width
    return _linear(
        roles, "mqa.o_b", layer, torch.einsum("pgw,grw->pgr", y, weight.unflatten(0, (y.shape[1], -1))).flatten(1)
    )


def _spans(roles: Roles, f: Formulas, role: str, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """A key for each whole span of positions, and from which positions it is not seen; position, span."""
    bias = roles[
        f"{role}.position.bias", layer, None
    ]  # positions of a span, width: once, or of the next span and its own
    span, width = len(bias), roles[f"{role}.norm.weight", layer, None].shape[0]
    count = len(x) // span
    kv, gate = (
        _linear(roles, f"{role}.{name}", layer, x)[: count * span].view(count, span, bias.shape[1])
        for name in ("kv", "gate")
    )
    gate = gate + bias
    if bias.shape[1] > width:
        before = [
            F.pad(y[:-1, :, :width], (0, 0, 0, 0, 1, 0), value=fill) for y, fill in ((kv, 0.0), (gate, -math.inf))
        ]
        kv, gate = (torch.cat([a, b[..., width:]], 1) for a, b in zip(before, (kv, gate), strict=True))
    keys = _norm(roles, f"{role}.norm", layer, (kv * gate.softmax(1)).sum(1), f)
    unseen = torch.arange(count) >= (torch.arange(len(x))[:, None] + 1) // span
    return _turned(keys, f, layer, torch.arange(count) * span), unseen


def _unchosen(roles: Roles, f: Formulas, layer: int, x: Tensor, latent: Tensor) -> Tensor:
    """The spans that are not among those of the highest scores; position, span."""
    keys, unseen = _spans(roles, f, "mqa.index", layer, x)
    share = _linear(roles, "mqa.index.share", layer, x)  # positions, heads
    q = _linear(roles, "mqa.index.q", layer, latent).view(len(x), share.shape[1], -1).transpose(0, 1)
    q = _turned(q, f, layer, torch.arange(len(x)))
    scores = torch.einsum("qh,hqk->qk", share, (q @ keys.T).relu()).masked_fill(unseen, -math.inf)
    return unseen | torch.ones_like(unseen).scatter(1, scores.topk(min(f.seen, len(keys))).indices, False)


def _turned(x: Tensor, f: Formulas, layer: int, at: Tensor) -> Tensor:
    """RoPE on adjacent pairs, the last `rotary` values of a head; `at`: the positions of ..., positions, head_dim."""
    half = f.rotary // 2
    angle = at[:, None] * f.theta[layer] ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., -f.rotary :: 2], x[..., 1 - f.rotary :: 2]
    turned = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(-2)
    return torch.cat([x[..., : -f.rotary], turned], -1)
