"""The vocabulary of a model's configuration: terms, and facts with their sources."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fact:
    """A value and its source: `run_config.yaml: num_layers`, `decoder....linear_proj.weight (60, 20)`."""

    value: Any
    where: str

    def __str__(self) -> str:
        return f"{self.where} = {shown(self.value)}"


Facts = Mapping[str, Fact]


class Given(dict[str, Any]):
    """The caller's entries of config.json, over those of the checkpoint's own (`beside`)."""

    def __init__(self, entries: Mapping[str, Any], beside: Collection[str] = ()) -> None:
        super().__init__(entries)
        self.beside = {*beside}

    def where(self, *names: str) -> str:
        """The source of entries, for a message."""
        return f"{'config.json' if self.beside.issuperset(names) else 'config='}: {', '.join(names)}"

    def rename(self, old: str, new: str) -> None:
        """Rename an entry, if it is there."""
        if old in self:
            self[new] = self.pop(old)
            self.beside |= {new} if old in self.beside else set()


# Term -> the question for a missing one. Dims are those of mappings/roles.toml, and a few more.
TERMS = {
    "vocab": "tokens with an embedding; the tensors have {rows} rows, and which of them are padding they do not tell",
    "hidden": "width of the residual stream",
    "layers": "blocks of attention and MLP",
    "heads": "query heads; the tensors tell only how wide all heads are together",
    "kv_heads": "key and value heads",
    "head_dim": "width of one head",
    "ffn": "inner width of the dense MLP",
    "moe_ffn": "inner width of one expert",
    "experts": "experts of one layer",
    "positions": "learned positions",
    "context": "the longest sequence",
    "activation": "activation of the MLP: silu, gelu, gelu_pytorch_tanh, relu2",
    "eps": "epsilon of the norms",
    "tied": "whether the output head is the embedding",
    "theta": "base and scaling of the rotary embedding: {{'rope_type': 'default', 'rope_theta': 10000.0}}",
    "scaling": "scaling of the rotary embedding: Llama 3.1 and 3.3 have {{'rope_type': 'llama3', 'factor': 8.0, "
    "'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192}}, Llama 3.2 factor 32; "
    "gpt-oss {{'rope_type': 'yarn', 'factor': 32.0, 'beta_fast': 32.0, 'beta_slow': 1.0, 'truncate': False, "
    "'original_max_position_embeddings': 4096}}",
    "kv_rank": "width of the latent of keys and values",
    "nope_dim": "width of a head's query and key that RoPE does not turn",
    "rope_dim": "width of a head's query that it turns",
    "v_dim": "width of a head's value",
    "top_k": "experts that a token goes to",
    "renormalize": "whether the weights of a token's experts are made to sum to one",
    "window": "tokens that sliding attention sees",
    "pattern": "which layers have sliding attention",
    "query_scale": "the queries are divided by the root of it",
    "logit_softcap": "soft cap of the logits, or None",
    "attn_softcap": "soft cap of the attention scores, or None",
    "clamp": "what gate and up of an expert are clamped to",
    "routed_scale": "factor of the routed experts' sum",
    "router_groups": "groups of experts",
    "top_groups": "groups that a token's experts come from",
}

# Terms that only some models have. A family that cannot express one refuses any other value than this.
PLAIN: Mapping[str, object] = {
    "partial": 1.0,
    "interleaved": False,
    "learned": False,
    "qkv_bias": False,
    "o_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "post_norms": False,
    "embed_scaled": False,
    "mla": False,
    "scaling": None,
    "window": None,
    "pattern": None,
    "softmax_scale": None,
    "query_scale": None,
    "logit_softcap": None,
    "attn_softcap": None,
    "sinks": False,
    "clamp": None,
    "up_offset": 0.0,
    "experts": None,
    "dense": (),
    "shared_ffn": None,
    "routed_scale": 1.0,
    "router_groups": 1,
    "top_groups": 1,
    "score": "softmax",
    "expert_bias": False,
}


def listing(terms: Facts, names: Collection[str]) -> str:
    """Return some facts with their sources, for a message."""
    return ", ".join(str(terms[name]) for name in sorted(names))


def shown(value: object) -> str:
    """Return a value for a message, shortened.

    >>> shown({"_target_": "torch.bfloat16", "_call_": False})
    'torch.bfloat16'
    """
    if isinstance(value, Mapping) and isinstance(value.get("_target_"), str):
        return str(value["_target_"])
    if isinstance(value, list | tuple) and len(value) > 8:
        return f"[{', '.join(shown(item) for item in value[:6])}, ... {len(value)} values]"
    if isinstance(value, Mapping | list | tuple) and not _flat(value):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not _is_short(value):
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _flat(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> bool:
    items = value.values() if isinstance(value, Mapping) else value
    return len(value) <= 8 and all(isinstance(item, str | float | None) or _is_short(item) for item in items)


def _is_short(value: object) -> bool:
    """Whether it is a whole number that Python can print: it refuses the longest."""
    return isinstance(value, int) and value.bit_length() <= 256


def target(value: object) -> str | None:
    """Return the class that NeMo or Megatron-Bridge dumped a mapping from, by name only."""
    name = value.get("_target_") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None
