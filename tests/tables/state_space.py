"""A state space (Mamba 2) as formulas over roles, position by position."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.tables.reference_forward import Formulas, Roles, _even, _linear


def state_space(roles: Roles, f: Formulas, layer: int, x: Tensor) -> Tensor:
    """States of heads fade, a token writes into them, and reads: by matrices that the heads of a group share."""
    length, heads = len(x), len(roles["ssm.log_decay", layer, None])
    v, b, c = (_convolved(roles, f"ssm.conv.{name}", layer, _linear(roles, f"ssm.{name}", layer, x)) for name in "xbc")
    v = v.view(length, heads, -1)  # positions, heads, width of a head
    b, c = (y.view(length, f.key_heads, -1).repeat_interleave(heads // f.key_heads, 1) for y in (b, c))
    step = _linear(roles, "ssm.step", layer, x) + roles["ssm.step.offset", layer, None]
    step = F.softplus(step).clamp(min=f.least_step)  # positions, heads
    stays = (-roles["ssm.log_decay", layer, None].exp() * step).exp()
    state, out = torch.zeros(heads, v.shape[-1], b.shape[-1], dtype=x.dtype), []
    for at in range(length):
        written = torch.einsum("hv,hs->hvs", v[at] * step[at][:, None], b[at])
        state = state * stays[at][:, None, None] + written
        out.append(torch.einsum("hvs,hs->hv", state, c[at]) + roles["ssm.skip", layer, None][:, None] * v[at])
    y = torch.stack(out).flatten(1) * F.silu(_linear(roles, "ssm.gate", layer, x))
    y = _even(y.unflatten(1, (f.key_heads, -1)), f.eps).flatten(1) * roles["ssm.norm.weight", layer, None]
    return _linear(roles, "ssm.o", layer, y)


def _convolved(roles: Roles, role: str, layer: int, x: Tensor) -> Tensor:
    """Each channel's last positions, weighted."""
    weight, bias = roles[f"{role}.weight", layer, None], roles.get((f"{role}.bias", layer, None), torch.zeros(1))
    seen = F.pad(x, (0, 0, weight.shape[1] - 1, 0)).unfold(0, weight.shape[1], 1)  # positions, channels, positions seen
    return F.silu((seen * weight).sum(-1) + bias)
