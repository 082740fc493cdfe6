"""Llama and its relatives as Tripy modules, without a KV cache.

The relatives are Mistral, Qwen2 and Qwen3. They differ in biases, in norms of query and key, and in sliding windows, as
config and class say.
"""

from __future__ import annotations

from typing import Any

import nvtripy as tp

from bridge.core.errors import PlanError
from bridge.targets.tripy.models.layers import Heads, Parts, Seen, activation


class Rotary:
    """Tables of cosines and sines, made in `forward` from the frequencies of config.json."""

    def __init__(self, config: Any) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rope = config.rope_parameters
        kind, partial = rope["rope_type"], rope.get("partial_rotary_factor", 1.0)
        if partial != 1.0 and kind != "default":  # the classes read it with a scaling only
            raise PlanError(f"config.json: partial_rotary_factor {partial}: Tripy modules rotate whole heads only")
        # transformers' own formulas: inverse frequencies of half a head, and the factor of cosines and sines
        default = LlamaRotaryEmbedding.compute_default_rope_parameters
        frequencies, factor = (default if kind == "default" else ROPE_INIT_FUNCTIONS[kind])(config)
        self.frequencies, self.factor = frequencies.tolist(), float(factor)

    def tables(self, length: Any) -> tuple[Any, Any]:
        """Cosines and sines, float32 [length, head_dim / 2]."""
        position = tp.unsqueeze(tp.arange(length, dtype=tp.float32), 1)
        angle = position * tp.Tensor([self.frequencies])
        return tp.cos(angle) * self.factor, tp.sin(angle) * self.factor


def rotate(x: Any, tables: tuple[Any, Any]) -> Any:
    """Rotate the halves of every head by its position: [batch, heads, length, head_dim], float32 out."""
    cos, sin = tables
    first, second = tp.split(tp.cast(x, tp.float32), 2, dim=-1)
    return tp.concatenate([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(tp.Module):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        width, kind, count = config.hidden_size, config.model_type, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or width // count
        self.heads = Heads(count, config.num_key_value_heads, head_dim, head_dim**-0.5)
        queries, keys = self.heads.queries * head_dim, self.heads.keys * head_dim
        out_bias = getattr(config, "attention_bias", False)
        bias = kind == "qwen2" or out_bias
        self.q_proj = parts.linear(f"{name}.q_proj", width, queries, bias)
        self.k_proj = parts.linear(f"{name}.k_proj", width, keys, bias)
        self.v_proj = parts.linear(f"{name}.v_proj", width, keys, bias)
        self.o_proj = parts.linear(f"{name}.o_proj", queries, width, out_bias)
        self.normed = kind == "qwen3"
        if self.normed:
            self.q_norm = parts.rms_norm(head_dim, config.rms_norm_eps)
            self.k_norm = parts.rms_norm(head_dim, config.rms_norm_eps)

    def forward(self, x: Any, tables: tuple[Any, Any], seen: Seen) -> Any:
        query = self.heads.split(self.q_proj(x), seen, self.heads.queries)
        key, value = (self.heads.split(part(x), seen, self.heads.keys) for part in (self.k_proj, self.v_proj))
        if self.normed:
            query, key = self.q_norm(query), self.k_norm(key)
        return self.o_proj(self.heads.attend(rotate(query, tables), rotate(key, tables), value, seen))


class MLP(tp.Module):
    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        width, ffn, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
        self.act = activation(config.hidden_act)
        self.gate_proj = parts.linear(f"{name}.gate_proj", width, ffn, bias)
        self.up_proj = parts.linear(f"{name}.up_proj", width, ffn, bias)
        self.down_proj = parts.linear(f"{name}.down_proj", ffn, width, bias)

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(tp.Module):
    """One layer, norms first."""

    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        self.input_layernorm = parts.rms_norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, parts, f"{name}.self_attn")
        self.post_attention_layernorm = parts.rms_norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, parts, f"{name}.mlp")

    def forward(self, x: Any, tables: tuple[Any, Any], seen: Seen) -> Any:
        x = x + self.self_attn(self.input_layernorm(x), tables, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(tp.Module):
    """Token ids to hidden states."""

    def __init__(self, config: Any, parts: Parts, prefix: str = "") -> None:
        super().__init__()
        self.windows, self.rotary = _windows(config), Rotary(config)
        self.embed_tokens = parts.embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, parts, f"{prefix}layers.{at}") for at in range(config.num_hidden_layers)]
        self.norm = parts.rms_norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """int32 [batch, length] -> [batch, length, hidden]; `attention_mask` is 0 at padding."""
        tables = self.rotary.tables(input_ids.shape[1])
        seen = {w: Seen.of(input_ids, attention_mask, causal=True, window=w) for w in dict.fromkeys(self.windows)}
        x = self.embed_tokens(input_ids)
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = layer(x, tables, seen[window])
        return self.norm(x)


class LlamaForCausalLM(tp.Module):
    """Token ids to logits."""

    def __init__(self, config: Any, parts: Parts) -> None:
        super().__init__()
        self.model = LlamaModel(config, parts, "model.")
        self.lm_head = parts.linear("lm_head", config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """int32 [batch, length] -> [batch, length, vocab]."""
        return self.lm_head(self.model(input_ids, attention_mask))


def _windows(config: Any) -> list[int | None]:
    """The window of each layer, None for full attention; Mistral has one window, Qwen a kind for each layer."""
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral":
        return [window] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    if not known.keys() >= set(kinds):
        unknown = " or ".join(sorted(set(kinds) - known.keys()))
        raise PlanError(f"config.json: layer_types {unknown} are unknown; use {' or '.join(known)}")
    return [known[kind] for kind in kinds]
