"""A source made of arrays, for tests that need no model: tiny Llama-shaped tensors with pairwise different extents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.dtypes import DTYPES, from_float32
from bridge.core.errors import SourceError
from bridge.core.values import TensorSpec
from bridge.sources.source import SourceBase

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 80,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def llama_shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensor -> shape of a Llama with this config."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[f"num_{n}_heads"] * config["head_dim"] for n in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        rows = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        shapes |= {f"{at}.self_attn.{p}_proj.weight": shape for p, shape in rows.items()}
        shapes |= {f"{at}.mlp.{p}_proj.weight": (ffn, hidden) for p in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {f"{at}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    return shapes


@dataclass
class MadeSource(SourceBase):
    """Arrays under checkpoint names; `broken` names tensors whose read fails."""

    arrays: dict[str, np.ndarray]
    specs: Mapping[str, TensorSpec]
    config: Mapping[str, Any] = field(default_factory=lambda: dict(CONFIG))
    side_files: Mapping[str, Path | bytes] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    dialect: str = "hf"
    where: str = "made"
    name: str = "made"
    can_run: bool = False
    fingerprint: str = "made"
    dropped: Mapping[str, str] = field(default_factory=dict)
    quantized: None = None
    calibration: None = None

    def read(self, name: str) -> np.ndarray:
        if name in self.broken:
            raise SourceError(f"{name}: the shard vanished")
        return self.arrays[name]

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        return self.read(name)[begin:end]

    def place(self, name: str) -> tuple[str, int]:
        return "", 0

    def load_model(self) -> Any:
        raise SourceError("made of arrays: there is no model")

    def load_tokenizer(self) -> Any:
        raise SourceError("made of arrays: there is no tokenizer")


def made_llama(dtype: str = "float32", seed: int = 0, **changes: np.ndarray) -> MadeSource:
    """A random Llama of `CONFIG`; `changes` replaces tensors (float32 values) by name with `__` for dots."""
    rng = np.random.default_rng(seed)
    values = {n: rng.standard_normal(s, np.float32) for n, s in llama_shapes().items()}
    values |= {name.replace("__", "."): array for name, array in changes.items()}
    arrays = {name: from_float32(array, dtype) for name, array in values.items()}
    specs = {name: TensorSpec(name, array.shape, dtype) for name, array in arrays.items()}
    assert all(array.dtype == DTYPES[dtype].storage for array in arrays.values())
    return MadeSource(arrays, specs)
