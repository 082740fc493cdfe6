"""Leave the recurrences of state-space and linear-attention layers as one node each.

transformers pads the tokens to chunks of a fixed size and loops over them in Python, or over single tokens, which torch
would unroll for the example's length. Here all that is computed for each token at once stays in torch, and the
recurrence is a node of domain `bridge` that `loops.py` replaces by an ONNX Scan. It continues any state by any number
of tokens, so that one graph reads a prompt, a chunk of it, and one token.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional

from bridge.targets.onnx.export.calls.states import take_asked
from bridge.targets.onnx.export.this_thread import for_this_thread

DOMAIN = "bridge"
SELECTIVE, CHUNKS, DELTA = "SelectiveScan", "ChunkScan", "DeltaRule"


@contextmanager
def recurrences_as_nodes(model: Any) -> Iterator[None]:
    """Replace the functions in the modules of transformers whose code `model` runs; other threads see no difference.

    Layers of `model` that have no such function get another forward for good.
    """
    homes = [sys.modules[name] for name in sorted({type(module).__module__ for module in model.modules()})]
    with ExitStack() as stack:
        for home in homes:
            for name, function in REPLACED.items():
                if original := getattr(home, name, None):
                    stack.callback(setattr, home, name, original)
                    setattr(home, name, for_this_thread(function, original))
        for name, module in model.named_modules():
            if forward := FORWARDS.get(type(module).__name__):
                module.forward = types.MethodType(forward, module)
                module.layer_idx = next(int(part) for part in name.split(".") if part.isdigit())
        yield


def _node(name: str, inputs: Sequence[Any], output: Sequence[Any], state: Any) -> tuple[Any, Any]:
    """The outputs of all tokens, of extents `output`, and the state after them."""
    made = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        (*(tensor.float() for tensor in inputs), state.float()),
        dtypes=[torch.float32] * 2,
        shapes=[tuple(output), tuple(state.shape)],
        version=1,
    )
    return made[0], made[1]


def _chunk_scan(
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int,
    D: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """`mamba2_chunk_scan`: state[head] = exp(dt A) state + dt x B, output = state C + D x."""
    batch, _tokens, heads, width = hidden_states.shape
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.clamp(functional.softplus(dt) if dt_softplus else dt, min=dt_limit[0], max=dt_limit[1]).float()
    x = hidden_states.float()
    state = x.new_zeros(batch, heads, width, B.shape[-1]) if initial_states is None else initial_states
    y, state = _node(CHUNKS, (x * dt[..., None], A.float() * dt, B, C), x.shape, state)
    y = y if D is None else y + x * D[..., None]
    return (y, state) if return_final_states else y


def _selective_scan(
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """`mamba_selective_scan`, from the state that its layer asked for, which transformers' own does not take."""
    batch, channels, _tokens = hidden_states.shape
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = (functional.softplus(dt) if delta_softplus else dt).float()
    state = take_asked()
    state = dt.new_zeros(batch, channels, A.shape[-1]) if state is None else state
    y, state = _node(SELECTIVE, (dt, dt * hidden_states.float(), B, C, A), hidden_states.shape, state)
    y = y.to(hidden_states.dtype)
    y = y if D is None else y + hidden_states * D[None, :, None]
    y = y if z is None else y * functional.silu(z)
    return (y, state) if return_last_state else y


def _delta_rule(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    chunk_size: int = 64,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Any, Any]:
    """The gated delta rule, with a decay `g` of each head, or of each channel of its keys (Kimi)."""
    batch, _tokens, heads, width = value.shape
    query, key = (x.float().repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    g = g if g.dim() == 4 else g[..., None]
    if initial_state is None:
        initial_state = query.new_zeros(batch, heads, key.shape[-1], width)
    inputs = (query * key.shape[-1] ** -0.5, key, value, g, beta[..., None])
    y, state = _node(DELTA, inputs, value.shape, initial_state)
    return y.to(value.dtype), state if output_final_state else None


def _lightning(
    self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, past_key_values: Any = None, **_: Any
) -> tuple[Any, None]:
    """MiniMax's linear attention, of one decay a head: state = exp(-slope) state + k v, output = q state."""
    batch, tokens, _width = hidden_states.shape
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    qkv = qkv if attention_mask is None else qkv * attention_mask[:, :, None].to(qkv.dtype)
    qkv = qkv.reshape(batch, tokens, self.num_attention_heads, 3 * self.head_dim)
    query, key, value = qkv.split(self.head_dim, dim=3)
    asked = None if past_key_values is None else past_key_values.get_recurrent_state(self.layer_idx)
    state = value.new_zeros(batch, value.shape[2], self.head_dim, self.head_dim) if asked is None else asked
    decay = -self.slope_rate.float().reshape(1, 1, -1).expand(batch, tokens, -1)
    y, state = _node(CHUNKS, (value, decay, key, query), value.shape, state.transpose(-1, -2))  # it has v before k
    if past_key_values is not None:
        past_key_values.update_recurrent_state(state.transpose(-1, -2), self.layer_idx)
    y = self.norm(y.to(hidden_states.dtype).flatten(2))
    return self.out_proj(functional.sigmoid(self.output_gate(hidden_states)) * y), None


def _gated_block(
    self: Any, input_states: Any, position_ids: Any, attention_mask: Any, past_key_values: Any = None, **_: Any
) -> tuple[Any, None]:
    """RecurrentGemma's recurrent block, which keeps its states in modules and reads padding as tokens."""
    tokens, width = input_states.shape[1], self.conv1d_width
    new = whole = self.linear_x(input_states).transpose(1, 2)
    self.rg_lru.recurrent_states = None
    if past_key_values is not None:
        self.rg_lru.recurrent_states = past_key_values.get_recurrent_state(self.layer_idx)
        whole = past_key_values.update_conv_state(new, self.layer_idx, conv_kernel_size=width)
    whole = functional.pad(whole[..., -(tokens + width) :], (width, 0))
    end, x = whole.shape[-1], self.conv_1d.bias[:, None]
    for back in range(width):  # the token at position p has p tokens before it, whatever stands there
        taps = whole[..., end - back - tokens : end - back] * (position_ids >= back)[:, None]
        x = x + taps * self.conv_1d.weight[:, :, width - 1 - back]
    self.rg_lru._rnn_scan = _gated_scan
    x = self.rg_lru(x.transpose(1, 2), position_ids)
    if past_key_values is not None:
        past_key_values.update_recurrent_state(self.rg_lru.recurrent_states, self.layer_idx)
    return self.linear_out(x * self.act_fn(self.linear_y(input_states))), None


def _gated_scan(hidden_states: Any, recurrent_gate: Any, reset: Any, recurrent_states: Any) -> tuple[Any, Any]:
    """state = gate state + x, from nothing where a text begins: a selective scan of one state a channel."""
    x = hidden_states.transpose(1, 2).float()
    dt = -(recurrent_gate * ~reset).transpose(1, 2).float().log()  # infinite where a text begins
    one = x[:, :1] * 0 + 1
    state = x[..., 0] * 0 if recurrent_states is None else recurrent_states
    inputs = (dt, x, one, one, -torch.ones(x.shape[1], 1))
    y, state = _node(SELECTIVE, inputs, x.shape, state[..., None])
    return y.transpose(1, 2).to(hidden_states.dtype), state[..., 0]


FORWARDS: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": _lightning,
    "RecurrentGemmaRecurrentBlock": _gated_block,
}
REPLACED: dict[str, Callable[..., Any]] = {
    "mamba2_chunk_scan": _chunk_scan,
    "mamba_selective_scan": _selective_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}
