"""A configuration's vocabulary: terms, facts with sources, types and limits of values.

Nothing is converted: the text "false" is not False, and a word in place of a number is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
    """The caller's entries of config.json, over those of the checkpoint's own (`from_checkpoint`)."""

    def __init__(self, entries: Mapping[str, Any], from_checkpoint: Collection[str] = ()) -> None:
        super().__init__(entries)
        self.from_checkpoint = {*from_checkpoint}

    def where(self, *names: str) -> str:
        """The source of entries, for a message."""
        return f"{'config.json' if self.from_checkpoint.issuperset(names) else 'config='}: {', '.join(names)}"

    def leaves_out(self, name: str) -> bool:
        """Whether the caller says None of a field that is no entry of config.json; takes it away."""
        if self.get(name, 0) is not None or name in self.from_checkpoint:
            return False
        del self[name]
        return True

    def rename(self, old: str, new: str) -> None:
        """Rename an entry, if it is there."""
        if old in self:
            self[new] = self.pop(old)
            self.from_checkpoint |= {new} if old in self.from_checkpoint else set()


# Term -> the question for a missing one. Dims are those of mappings/roles.toml, and a few more.
TERMS = {
    "vocab": "tokens with an embedding; the tensors have {rows} rows, and which of them are padding they do not tell",
    "hidden": "width of the residual stream",
    "layers": "blocks of attention and MLP",
    "drafts": "layers after these that draft tokens ahead",
    "heads": "query heads; the tensors tell only how wide all heads are together",
    "kv_heads": "key and value heads",
    "head_dim": "width of one head",
    "ffn": "inner width of the dense MLP",
    "moe_ffn": "inner width of one expert",
    "experts": "experts of one layer",
    "routed": "which layers have experts",
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


MAX_COUNT = 2**31 - 1
MAX_LAYERS = 10_000  # lists are made of these two; the deepest model known has some 130, the widest some 500
MAX_EXPERTS = 10_000
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # so that powers of numbers are finite


@dataclass(frozen=True)
class Kind:
    """`words`: the expected value, in messages."""

    words: str
    holds: Callable[[Any], bool]


def _count(most: int = MAX_COUNT) -> Kind:
    return Kind(f"a whole number above zero, at most {most}", lambda value: _is_count(value, most))


def _is_count(value: object, most: int = MAX_COUNT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and MIN_NUMBER <= value <= MAX_NUMBER


def _is_pair(value: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(holds, value))


def _is_window(value: object) -> bool:
    return _is_count(value) or _is_pair(value, lambda n: n in (-1, 0) or _is_count(n))


def _is_frequency(value: object) -> bool:
    several = isinstance(value, list | tuple) and len(value) <= MAX_LAYERS and all(n in (0, 1) for n in value)
    return several or _is_count(value, MAX_LAYERS)


def is_scaling(value: object) -> bool:
    """Whether it is a rotary embedding's scaling as in transformers: a rope_type and finite numbers."""
    if not isinstance(value, Mapping) or not isinstance(value.get("rope_type"), str):
        return False
    parts = [part for name, part in value.items() if name != "rope_type"]
    items = (item for part in parts for item in (part if isinstance(part, list | tuple) else [part]))
    return all(isinstance(item, bool | None) or item == 0 or _is_number(item) for item in items)


COUNT = _count()
NUMBER = Kind("a number above zero", _is_number)
FACTOR = Kind("a number, zero or above", lambda value: _is_number(value) or (value == 0 and value is not False))
FROM_ZERO = Kind(
    f"a whole number, zero or above, at most {MAX_LAYERS}",
    lambda given: type(given) is int and 0 <= given <= MAX_LAYERS,
)
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
WORD = Kind("a word", lambda value: isinstance(value, str))
WINDOW = Kind("a whole number, or two of which -1 means no bound", _is_window)
FREQUENCY = Kind(f"a whole number, or a list of 0 and 1, at most {MAX_LAYERS}", _is_frequency)

# By term. A term that is not here has no plain value; the code that makes it has checked it.
KINDS: Mapping[str, Kind] = {
    "layers": _count(MAX_LAYERS),
    "drafts": FROM_ZERO,
    "experts": _count(MAX_EXPERTS),
    **dict.fromkeys(
        (
            "vocab", "multiple", "hidden", "heads", "kv_heads", "head_dim", "ffn", "moe_ffn", "positions", "context",
            "top_k", "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim", "shared_ffn", "window", "router_groups",
            "top_groups", "rows", "gates",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        ("eps", "partial", "query_scale", "softmax_scale", "logit_softcap", "attn_softcap", "routed_scale", "clamp"),
        NUMBER,
    ),
    **dict.fromkeys(
        (
            "centered", "gated", "tied", "learned", "interleaved", "layer_norm", "qkv_bias", "o_bias", "mlp_bias",
            "qk_norm", "post_norms", "embed_scaled", "mla", "sinks", "expert_bias", "renormalize",
        ),
        TRUTH,
    ),
    **dict.fromkeys(("activation", "score"), WORD),
    "up_offset": FACTOR,
    "theta": Kind("a number above zero, or two of them", lambda v: _is_number(v) or _is_pair(v, _is_number)),
    "pattern": Kind("two whole numbers above zero", lambda value: _is_pair(value, _is_count)),
    "scaling": Kind("a mapping with a rope_type and finite numbers", is_scaling),
}  # fmt: skip


def mistyped(facts: dict[str, Fact], kinds: Mapping[str, Kind] = KINDS) -> list[str]:
    """Remove facts that are not of their kind, and return them as problems; None means that there is no value.

    >>> facts = {"layers": Fact("three", "run_config.yaml: num_layers")}
    >>> mistyped(facts), facts
    (["run_config.yaml: num_layers = 'three': must be a whole number above zero, at most 10000"], {})
    """
    values = {name: fact.value for name, fact in facts.items() if name in kinds and fact.value is not None}
    wrong = [name for name, value in values.items() if not kinds[name].holds(value)]
    return [f"{facts.pop(name)}: must be {kinds[name].words}" for name in wrong]
