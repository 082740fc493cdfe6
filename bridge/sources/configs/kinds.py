"""Types and limits of terms' values, checked before anything is computed.

Nothing is converted: the text "false" is not False, and a word in place of a number is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.sources.configs.facts import Fact

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
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
WORD = Kind("a word", lambda value: isinstance(value, str))
WINDOW = Kind("a whole number, or two of which -1 means no bound", _is_window)
FREQUENCY = Kind(f"a whole number, or a list of 0 and 1, at most {MAX_LAYERS}", _is_frequency)

# By term. A term that is not here has no plain value; the code that makes it has checked it.
KINDS: Mapping[str, Kind] = {
    "layers": _count(MAX_LAYERS),
    "experts": _count(MAX_EXPERTS),
    **dict.fromkeys(
        (
            "vocab", "hidden", "heads", "kv_heads", "head_dim", "ffn", "moe_ffn", "positions", "context", "top_k",
            "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim", "shared_ffn", "window", "router_groups",
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
