"""GPT-2 as Tripy modules, without a KV cache.

Names are those of Hugging Face and of Tripy's nanoGPT example.
"""

from __future__ import annotations

from typing import Any

import nvtripy as tp

from bridge.targets.tripy.models.layers import Heads, Parts, Seen, activation


class Attention(tp.Module):
    """Causal self-attention; two fields of the config decide the scaling."""

    def __init__(self, config: Any, parts: Parts, name: str, layer: int) -> None:
        super().__init__()
        width, count = config.hidden_size, config.num_attention_heads
        scaling = (width // count) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scaling /= layer + 1
        self.heads = Heads(count, count, width // count, scaling)
        self.c_attn = parts.linear(f"{name}.c_attn", width, 3 * width)
        self.c_proj = parts.linear(f"{name}.c_proj", width, width)

    def forward(self, x: Any, seen: Seen) -> Any:
        parts = tp.split(self.c_attn(x), 3, dim=2)
        query, key, value = (self.heads.split(part, seen, self.heads.queries) for part in parts)
        return self.c_proj(self.heads.attend(query, key, value, seen))


class MLP(tp.Module):
    def __init__(self, config: Any, parts: Parts, name: str) -> None:
        super().__init__()
        width = config.hidden_size
        ffn = config.n_inner or 4 * width
        self.act = activation(config.activation_function)
        self.c_fc = parts.linear(f"{name}.c_fc", width, ffn)
        self.c_proj = parts.linear(f"{name}.c_proj", ffn, width)

    def forward(self, x: Any) -> Any:
        return self.c_proj(self.act(self.c_fc(x)))


class Block(tp.Module):
    """One layer, norms first."""

    def __init__(self, config: Any, parts: Parts, name: str, layer: int) -> None:
        super().__init__()
        self.ln_1 = parts.layer_norm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = Attention(config, parts, f"{name}.attn", layer)
        self.ln_2 = parts.layer_norm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = MLP(config, parts, f"{name}.mlp")

    def forward(self, x: Any, seen: Seen) -> Any:
        x = x + self.attn(self.ln_1(x), seen)
        return x + self.mlp(self.ln_2(x))


class GPT2Model(tp.Module):
    """Token ids to hidden states."""

    def __init__(self, config: Any, parts: Parts, prefix: str = "") -> None:
        super().__init__()
        width = config.hidden_size
        self.wte = parts.embedding(config.vocab_size, width)
        self.wpe = parts.embedding(config.max_position_embeddings, width)
        self.h = [Block(config, parts, f"{prefix}h.{layer}", layer) for layer in range(config.num_hidden_layers)]
        self.ln_f = parts.layer_norm(width, config.layer_norm_epsilon)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """int32 [batch, length] -> [batch, length, hidden]; `attention_mask` is 0 at padding."""
        seen = Seen.of(input_ids, attention_mask, causal=True)
        x = self.wte(input_ids) + self.wpe(tp.unsqueeze(tp.arange(seen.length, dtype=tp.int32), 0))
        for block in self.h:
            x = block(x, seen)
        return self.ln_f(x)


class GPT2LMHeadModel(tp.Module):
    """Token ids to logits."""

    def __init__(self, config: Any, parts: Parts) -> None:
        super().__init__()
        self.transformer = GPT2Model(config, parts, "transformer.")
        self.lm_head = parts.linear("lm_head", config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """int32 [batch, length] -> [batch, length, vocab]."""
        return self.lm_head(self.transformer(input_ids, attention_mask))
