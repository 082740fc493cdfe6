"""A GPT as users of the nanoGPT example have it: plain `tp` layers, the checkpoint's names, the mask an attribute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def gpt(tp: Any, config: Any, dtype: Any, linear: Callable[..., Any], head: Callable[..., Any] | None = None) -> Any:
    """`config`: of a transformers GPT-2. `linear(name, in, out, bias)` makes the layers of a block, `head` the last."""
    width = config.n_embd

    class Attention(tp.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.c_attn = linear(f"{name}.c_attn", width, 3 * width, True)
            self.c_proj = linear(f"{name}.c_proj", width, width, True)
            square = (config.n_positions, config.n_positions)
            self.bias = tp.reshape(tp.tril(tp.ones(square, dtype=dtype)), (1, 1, *square))

        def forward(self, x: Any) -> Any:
            batch, length = x.shape[0:2]
            per_head = [batch, length, config.n_head, width // config.n_head]
            parts = tp.split(tp.cast(self.c_attn(x), tp.float32), 3, dim=2)
            query, key, value = (tp.transpose(tp.reshape(part, per_head), 1, 2) for part in parts)
            scores = (query @ tp.transpose(key, -2, -1)) / math.sqrt(per_head[-1])
            scores = tp.masked_fill(scores, self.bias[:, :, :length, :length] == 0, float("-inf"))
            mixed = tp.transpose(tp.softmax(scores, dim=-1) @ value, 1, 2)
            return self.c_proj(tp.cast(tp.reshape(mixed, [batch, length, width]), x.dtype))

    class Mlp(tp.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.c_fc = linear(f"{name}.c_fc", width, config.n_inner, True)
            self.c_proj = linear(f"{name}.c_proj", config.n_inner, width, True)

        def forward(self, x: Any) -> Any:
            x = self.c_fc(x)
            return self.c_proj(0.5 * x * (1.0 + tp.tanh(0.7978845608 * (x + 0.044715 * x * x * x))))

    class Block(tp.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.ln_1 = tp.LayerNorm(width, dtype=dtype)
            self.attn = Attention(f"{name}.attn")
            self.ln_2 = tp.LayerNorm(width, dtype=dtype)
            self.mlp = Mlp(f"{name}.mlp")

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Transformer(tp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = tp.Embedding(config.vocab_size, width, dtype=dtype)
            self.wpe = tp.Embedding(config.n_positions, width, dtype=dtype)
            self.h = tp.Sequential(*(Block(f"transformer.h.{at}") for at in range(config.n_layer)))
            self.ln_f = tp.LayerNorm(width, dtype=dtype)

        def forward(self, ids: Any) -> Any:
            positions = tp.unsqueeze(tp.arange(config.n_positions, dtype=tp.int32)[: ids.shape[1]], 0)
            return self.ln_f(self.h(self.wte(ids) + self.wpe(positions)))

    class Gpt(tp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = Transformer()
            self.lm_head = (head or plain)("lm_head", width, config.vocab_size, False)

        def forward(self, ids: Any) -> Any:
            return self.lm_head(self.transformer(ids))

    def plain(_: str, in_: int, out: int, bias: bool) -> Any:
        return tp.Linear(in_, out, bias, dtype)

    return Gpt()
