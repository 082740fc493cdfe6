"""MiniMax: linear attention with a decay a head, and its own cache."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from bridge.targets.onnx.export.family import Family
from bridge.targets.onnx.export.recurrent.replace import CHUNKS, recurrence


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
    y, state = recurrence(CHUNKS, (value, decay, key, query), value.shape, state.transpose(-1, -2))  # it has v before k
    if past_key_values is not None:
        past_key_values.update_recurrent_state(state.transpose(-1, -2), self.layer_idx)
    y = self.norm(y.to(hidden_states.dtype).flatten(2))
    return self.out_proj(functional.sigmoid(self.output_gate(hidden_states)) * y), None


def _cache(cache: type) -> Any:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return type("LightningCache", (cache, MiniMaxCache), {})()  # its model takes no other


FAMILY = Family(recurrences={"MiniMaxLightningAttention": _lightning}, cache=_cache)
