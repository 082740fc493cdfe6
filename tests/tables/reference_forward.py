"""The models as formulas over roles in normal form, in float64; never reads a module or a name of transformers.

It is the oracle of the tables: logits agree with transformers' only if every row says what its tensor means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

Roles = Mapping[tuple[str, int | None, int | None], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}


@dataclass(frozen=True)
class Formulas:
    """What a config says beyond extents. `theta` and `window` by layer: RoPE's base (0: none); 0: sees everything.

    `rotary`: how many values of a head turn, the first ones; 0: all. `nope`: how many do not where keys come from a
    latent; the others turn. `share`: what makes an expert's share of its score. `limit`: gate and up are clamped to
    it, as in gpt-oss; 0: they are not. `chunks`: a window is a chunk, which sees nothing before it. `unit_heads`:
    queries and keys that turn are divided by their root mean square; `temper`: those that do not, or of a latent, grow
    with the logarithm of the position, see Llama 4. `scales_input`: an expert's share multiplies what it reads. `seen`:
    how many positions an indexer chooses, `pairs`: whether its adjacent channels turn together, `chosen`: what the last
    one did not choose. `key_heads`: those of a gated delta net, or groups of a state space's heads; `least_step`: of
    a state space. `blocks`: keys of a block, how many an indexer chooses,
    and how many of the last it takes in any case. `bound`: gate and up are clamped to it, and gated as without;
    `given`: the experts of each position, whatever their scores; `sinkhorn`: how often shares of residual streams are
    divided by their sums, and what is added to them.
    """

    layers: int
    heads: int
    kv_heads: int
    theta: tuple[float, ...]
    window: tuple[int, ...]
    eps: float
    activation: str = "silu"
    causal: bool = True
    scale: float | None = None
    attention_cap: float = 0.0
    final_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    top_k: int = 0
    renormalize: bool = True
    rotary: int = 0
    nope: int = 0
    share: str = "softmax"
    share_scale: float = 1.0
    limit: float = 0.0
    chunks: bool = False
    unit_heads: bool = False
    temper: tuple[int, float] = (1, 0.0)
    scales_input: bool = False
    seen: int = 0
    pairs: bool = False
    chosen: list[Tensor] = field(default_factory=list)
    key_heads: int = 0
    least_step: float = 0.0
    blocks: tuple[int, int, int] = (0, 0, 0)
    bound: float = math.inf
    given: Tensor | None = None
    sinkhorn: tuple[int, float] = (0, 0.0)


def hidden_states(roles: Roles, f: Formulas, ids: Tensor, types: Tensor | None = None) -> Tensor:
    """Return what the last block (and the final norm, where there is one) gives: positions, hidden."""
    x = roles["embed.tokens.weight", None, None][ids] * f.embedding_scale
    if ("embed.positions.weight", None, None) in roles:
        x = x + roles["embed.positions.weight", None, None][: len(ids)]
    if types is not None:
        x = x + roles["embed.types.weight", None, None][types]
    x = _norm(roles, "embed.norm", None, x, f)
    for layer in range(f.layers):
        for block, kinds in BLOCKS.items():  # some models have one of them in a layer
            for mixer in [mixer for role, mixer in kinds.items() if (role, layer, None) in roles]:
                y = mixer(roles, f, layer, _norm(roles, f"{block}.norm", layer, x, f))
                x = x + _norm(roles, f"{block}.post_norm", layer, y, f) * f.residual_scale
                x = _norm(roles, f"{block}.add_norm", layer, x, f)
    return _norm(roles, "final.norm", None, x, f)


def vocabulary_logits(roles: Roles, f: Formulas, x: Tensor) -> Tensor:
    """Return logits over the vocabulary; through the extra block of a masked LM where there is one."""
    if ("mlm.dense.weight", None, None) in roles:
        x = ACTIVATIONS[f.activation](_linear(roles, "mlm.dense", None, x))
        x = _norm(roles, "mlm.norm", None, x, f)
    logits = _linear(roles, "head", None, x) * f.logit_scale
    return f.final_cap * torch.tanh(logits / f.final_cap) if f.final_cap else logits


def score_logits(roles: Roles, x: Tensor, role: str = "score") -> Tensor:
    """Return logits over labels for each row of `x`."""
    return _linear(roles, role, None, x)


def pooled(roles: Roles, x: Tensor) -> Tensor:
    """Return the summary of a sequence that BERT takes from its first position."""
    return torch.tanh(_linear(roles, "pool", None, x[:1]))


def _norm(roles: Roles, role: str, layer: int | None, x: Tensor, f: Formulas) -> Tensor:
    weight = roles.get((f"{role}.weight", layer, None))
    if weight is None:
        return x
    if (f"{role}.bias", layer, None) in roles:
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + f.eps).rsqrt()
        return centred * spread * weight + roles[f"{role}.bias", layer, None]
    return x * (x.square().mean(-1, keepdim=True) + f.eps).rsqrt() * weight


def _linear(roles: Roles, role: str, layer: int | None, x: Tensor, expert: int | None = None) -> Tensor:
    y = x @ roles[f"{role}.weight", layer, expert].T
    return y + roles[f"{role}.bias", layer, expert] if (f"{role}.bias", layer, expert) in roles else y


def _rotate(x: Tensor, theta: float, rotary: int = 0) -> Tensor:
    """RoPE on heads, positions, head_dim: the pairs lie half a head apart."""
    if not theta:
        return x
    if rotary:
        return torch.cat([_rotate(x[..., :rotary], theta), x[..., rotary:]], dim=-1)
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency  # positions, half
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def _attention(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    length = len(x)
    q = _norm(roles, "attn.q_norm_all", layer, _linear(roles, "attn.q", layer, x), f)
    k = _norm(roles, "attn.k_norm_all", layer, _linear(roles, "attn.k", layer, x), f)
    q = q.view(length, f.heads, -1).transpose(0, 1)  # heads, positions, head_dim
    k = k.view(length, f.kv_heads, -1).transpose(0, 1)
    v = _linear(roles, "attn.v", layer, x).view(length, f.kv_heads, -1).transpose(0, 1)
    q = _rotate(_norm(roles, "attn.q_norm", layer, q, f), f.theta[layer], f.rotary)
    k = _rotate(_norm(roles, "attn.k_norm", layer, k, f), f.theta[layer], f.rotary)
    q, k = _norm(roles, "attn.q_rope_norm", layer, q, f), _norm(roles, "attn.k_rope_norm", layer, k, f)
    q, k = _like_llama4(f, layer, q, k)
    share = f.heads // f.kv_heads  # query heads that look at one key head
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = q @ k.transpose(1, 2) * (f.scale or 1 / math.sqrt(q.shape[-1]))
    if f.attention_cap:
        scores = f.attention_cap * torch.tanh(scores / f.attention_cap)
    behind = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    hidden = (behind < 0) & f.causal
    if f.window[layer]:
        first = torch.arange(length)[:, None] % f.window[layer] + 1 if f.chunks else f.window[layer]
        hidden = hidden | (behind >= first)
    if ("attn.index.q.weight", layer, None) in roles:
        hidden = hidden | _not_in_blocks(roles, f, layer, x).repeat_interleave(share, 0)
    scores = scores.masked_fill(hidden, -math.inf)
    if ("attn.sink.bias", layer, None) in roles:
        sink = roles["attn.sink.bias", layer, None][:, None, None].expand(-1, length, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    y = (weights @ v).transpose(0, 1).reshape(length, -1)
    if ("attn.gate.weight", layer, None) in roles:
        y = y * _linear(roles, "attn.gate", layer, x).sigmoid()
    return _linear(roles, "attn.o", layer, y)


def _not_in_blocks(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    """The indexer of MiniMax M3: keys that are in none of the blocks with the highest scores; head, query, key."""
    size, count, local = f.blocks
    length = len(x)
    k = _norm(roles, "attn.index.k_norm", layer, _linear(roles, "attn.index.k", layer, x), f)
    q = _linear(roles, "attn.index.q", layer, x).view(length, -1, k.shape[-1]).transpose(0, 1)
    q = _rotate(_norm(roles, "attn.index.q_norm", layer, q, f), f.theta[layer], f.rotary)
    position = torch.arange(length)
    scores = (q @ _rotate(k, f.theta[layer], f.rotary).T).masked_fill(position > position[:, None], -math.inf)
    blocks = torch.stack([part.amax(-1) for part in scores.split(size, -1)], -1)  # head, query, block
    behind = position[:, None] // size - torch.arange(blocks.shape[-1])
    blocks = blocks.masked_fill((behind >= 0) & (behind < local), math.inf)
    chosen = blocks.topk(min(count, blocks.shape[-1])).indices
    return torch.ones_like(blocks, dtype=torch.bool).scatter(-1, chosen, False)[..., position // size]


def _delta_net(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    """Gated delta net: a state of each head fades, and a token replaces what its key recalls of it by its value."""
    length, heads = len(x), len(roles["gdn.log_decay", layer, None])
    q, k, v = (_convolved(roles, name, layer, _linear(roles, f"gdn.{name}", layer, x)) for name in "qkv")
    q, k = (_unit(y.view(length, f.key_heads, -1)).repeat_interleave(heads // f.key_heads, 1) for y in (q, k))
    v = v.view(length, heads, -1)  # positions, heads, width of a value
    beta = _linear(roles, "gdn.beta", layer, x).sigmoid()
    rate = roles["gdn.log_decay", layer, None].exp() * F.softplus(_linear(roles, "gdn.decay", layer, x))
    state, out = torch.zeros(heads, q.shape[-1], v.shape[-1], dtype=x.dtype), []
    for at in range(length):
        state = state * (-rate[at]).exp()[:, None, None]
        recalled = torch.einsum("hk,hkv->hv", k[at], state)
        state = state + torch.einsum("hk,hv->hkv", k[at], beta[at][:, None] * (v[at] - recalled))
        out.append(torch.einsum("hk,hkv->hv", q[at], state) / math.sqrt(q.shape[-1]))
    y = _norm(roles, "gdn.norm", layer, torch.stack(out), f)
    return _linear(roles, "gdn.o", layer, y.reshape(length, -1) * F.silu(_linear(roles, "gdn.gate", layer, x)))


def _convolved(roles: Roles, name: str, layer: int, x: Tensor) -> Tensor:
    """Each channel's last positions, weighted."""
    weight = roles[f"gdn.conv.{name}.weight", layer, None]  # channels, positions seen
    seen = F.pad(x, (0, 0, weight.shape[1] - 1, 0)).unfold(0, weight.shape[1], 1)  # positions, channels, positions seen
    return F.silu((seen * weight).sum(-1))


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _like_llama4(f: Formulas, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Heads of one length after RoPE; without RoPE, queries that grow with their position."""
    if f.theta[layer]:
        return (q, k) if not f.unit_heads else (_even(q, f.eps), _even(k, f.eps))
    return _tempered(f, q, first=1), k


def _tempered(f: Formulas, q: Tensor, first: int) -> Tensor:
    """Queries that grow with their position, which is `first` for the first."""
    floor, scale = f.temper
    position = torch.arange(first, first + q.shape[1], dtype=q.dtype)
    return q * (torch.log1p((position / floor).floor()) * scale + 1)[:, None]


def _even(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _latent_attention(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    """MLA: keys and values of all heads from one latent, beside it one rotary key that they share."""
    length, inner = len(x), replace(f, eps=1e-6)  # whatever the config says of the other norms
    if ("mla.q.weight", layer, None) in roles:
        q = _linear(roles, "mla.q", layer, x)
    else:
        latent = _norm(roles, "mla.q_a_norm", layer, _linear(roles, "mla.q_a", layer, x), inner)
        q = _linear(roles, "mla.q_b", layer, latent)
    q = q.view(length, f.heads, -1).transpose(0, 1)  # heads, positions, nope + rope
    shrunk = _linear(roles, "mla.kv_a", layer, x)
    rank = roles["mla.k_b.weight", layer, None].shape[1]
    latent = _norm(roles, "mla.kv_a_norm", layer, shrunk[:, :rank], inner)
    up = [_linear(roles, name, layer, latent).view(length, f.heads, -1) for name in ("mla.k_b", "mla.v_b")]
    k, v = (each.transpose(0, 1) for each in up)
    turned = _rotate(_halves(shrunk[:, rank:]), f.theta[layer]).expand(f.heads, -1, -1)
    k = torch.cat([k, turned], -1)
    q = torch.cat([q[..., : f.nope], _rotate(_halves(q[..., f.nope :]), f.theta[layer])], -1)
    scores = _tempered(f, q, first=0) @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    hidden = torch.arange(length)[:, None] < torch.arange(length)[None, :]
    if f.seen:
        latent = _norm(roles, "mla.q_a_norm", layer, _linear(roles, "mla.q_a", layer, x), inner)
        if ("mla.index.q.weight", layer, None) in roles:
            f.chosen[:] = [_not_chosen(roles, inner, layer, x, latent, hidden)]
        hidden = hidden | f.chosen[0]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return _linear(roles, "mla.o", layer, (weights @ v).transpose(0, 1).reshape(length, -1))


def _not_chosen(roles: Roles, f: Formulas, layer: int, x: Tensor, latent: Tensor, hidden: Tensor) -> Tensor:
    """The indexer of DeepSeek-V3.2: what is not among the positions of the highest scores; query, key."""
    share = _linear(roles, "mla.index.share", layer, x)  # positions, heads
    k = _norm(roles, "mla.index.k_norm", layer, _linear(roles, "mla.index.k", layer, x), f)
    q = _linear(roles, "mla.index.q", layer, latent).view(len(x), share.shape[1], -1).transpose(0, 1)
    if f.pairs:
        q, k = (torch.cat([_halves(y[..., : f.rotary]), y[..., f.rotary :]], -1) for y in (q, k))
    q, k = _rotate(q, f.theta[layer], f.rotary), _rotate(k, f.theta[layer], f.rotary)
    scores = torch.einsum("qh,hqk->qk", share, (q @ k.T).relu()).masked_fill(hidden, -math.inf)
    return torch.ones_like(hidden).scatter(1, scores.topk(min(f.seen, len(x))).indices, False)


def _halves(x: Tensor) -> Tensor:
    """Pairs side by side, as DeepSeek has them, to pairs half a head apart."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


def _gated_mlp(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    return _gated(roles, f, "mlp", layer, x)


def _gated(roles: Roles, f: Formulas, role: str, layer: int, x: Tensor, expert: int | None = None) -> Tensor:
    for fc in ("fc", "latent_fc"):  # not gated
        if (f"{role}.{fc}1.weight", layer, expert) in roles:
            inner = ACTIVATIONS[f.activation](_linear(roles, f"{role}.{fc}1", layer, x, expert))
            return _linear(roles, f"{role}.{fc}2", layer, inner, expert)
    gate, up = (_linear(roles, f"{role}.{name}", layer, x, expert) for name in ("gate", "up"))
    if f.limit:
        gate, up = gate.clamp(max=f.limit), up.clamp(-f.limit, f.limit)
        inner = (up + 1) * gate * (1.702 * gate).sigmoid()
    else:
        inner = ACTIVATIONS[f.activation](gate.clamp(max=f.bound)) * up.clamp(-f.bound, f.bound)
    return _linear(roles, f"{role}.down", layer, inner, expert)


def _experts(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    scores = SHARES[f.share](_linear(roles, "moe.router", layer, x))
    chosen = (scores + roles.get(("moe.router.choice_bias", layer, None), torch.zeros(1))).topk(f.top_k).indices
    chosen = chosen if f.given is None else f.given
    share = scores.gather(1, chosen)
    if f.renormalize:
        share = share / share.sum(-1, keepdim=True)
    share = share * f.share_scale
    shared = torch.zeros_like(x)
    if {("moe.shared.gate.weight", layer, None), ("moe.shared.fc1.weight", layer, None)} & roles.keys():
        shared = _gated(roles, f, "moe.shared", layer, x)
    if ("moe.shared.router.weight", layer, None) in roles:
        shared = shared * _linear(roles, "moe.shared.router", layer, x).sigmoid()
    latent = ("moe.latent.down.weight", layer, None) in roles
    x = _linear(roles, "moe.latent.down", layer, x) if latent else x
    out = torch.zeros_like(x)
    for position in range(len(x)):
        for weight, expert in zip(share[position], chosen[position].tolist(), strict=True):
            row = x[position : position + 1] * (weight if f.scales_input else 1)
            part = _gated(roles, f, "moe", layer, row, expert)[0]
            out[position] += part if f.scales_input else weight * part
    return shared + (_linear(roles, "moe.latent.up", layer, out) if latent else out)


Mixer = Callable[[Roles, Formulas, int, Tensor], Tensor]


def _state_space(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    from tests.tables.state_space import state_space  # which has the parts above

    return state_space(roles, f, layer, x)


BLOCKS: dict[str, dict[str, Mixer]] = {  # block of a layer -> a role that it has, and what it computes
    "attn": {
        "mla.o.weight": _latent_attention, "gdn.o.weight": _delta_net, "attn.o.weight": _attention,
        "ssm.o.weight": _state_space,
    },
    "mlp": {"mlp.gate.weight": _gated_mlp, "mlp.fc1.weight": _gated_mlp, "moe.router.weight": _experts},
}  # fmt: skip
