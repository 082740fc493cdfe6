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

from bridge.targets.onnx.export.calls.states import take_requested_state
from bridge.targets.onnx.export.family import families_of
from bridge.targets.onnx.export.this_thread import for_this_thread

DOMAIN = "bridge"
SELECTIVE, CHUNKS, DELTA = "SelectiveScan", "ChunkScan", "DeltaRule"


@contextmanager
def recurrences_as_nodes(model: Any) -> Iterator[None]:
    """Replace the functions in the modules of transformers whose code `model` runs; other threads see no difference.

    Layers of `model` that have no such function get another forward for good.
    """
    homes = [sys.modules[name] for name in sorted({type(module).__module__ for module in model.modules()})]
    forwards = {kind: forward for family in families_of(model) for kind, forward in family.recurrences.items()}
    with ExitStack() as stack:
        for home in homes:
            for name, function in REPLACED.items():
                if original := getattr(home, name, None):
                    stack.callback(setattr, home, name, original)
                    setattr(home, name, for_this_thread(function, original))
        for name, module in model.named_modules():
            if forward := forwards.get(type(module).__name__):
                module.forward = types.MethodType(forward, module)
                module.layer_idx = next(int(part) for part in name.split(".") if part.isdigit())
        yield


def recurrence(name: str, inputs: Sequence[Any], output: Sequence[Any], state: Any) -> tuple[Any, Any]:
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
    y, state = recurrence(CHUNKS, (x * dt[..., None], A.float() * dt, B, C), x.shape, state)
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
    state = take_requested_state()
    state = dt.new_zeros(batch, channels, A.shape[-1]) if state is None else state
    y, state = recurrence(SELECTIVE, (dt, dt * hidden_states.float(), B, C, A), hidden_states.shape, state)
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
    y, state = recurrence(DELTA, inputs, value.shape, initial_state)
    return y.to(value.dtype), state if output_final_state else None


REPLACED: dict[str, Callable[..., Any]] = {
    "mamba2_chunk_scan": _chunk_scan,
    "mamba_selective_scan": _selective_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}
