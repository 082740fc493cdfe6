"""What kind of value a term has, and how large it may be: asked before anything is computed of it; converts nothing.

A word in the place of a truth or of a number is an error: the text "false" is no False.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.sources.foreign_config.said import Said

MOST = 2**31 - 1
MOST_LAYERS = 10_000  # lists are made of these two; the deepest model known has some 130, the widest some 500
MOST_EXPERTS = 10_000
SMALLEST, LARGEST = 1e-30, 1e30  # of numbers, so that powers of them are numbers as well


@dataclass(frozen=True)
class Kind:
    """`words`: what a message says that the value must be."""

    words: str
    holds: Callable[[Any], bool]


def _count(most: int = MOST) -> Kind:
    return Kind(f"a whole number above zero, at most {most}", lambda value: _is_count(value, most))


def _is_count(value: object, most: int = MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST


def _is_pair(value: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(holds, value))


def _is_window(value: object) -> bool:
    return _is_count(value) or _is_pair(value, lambda n: n in (-1, 0) or _is_count(n))


def _is_frequency(value: object) -> bool:
    several = isinstance(value, list | tuple) and len(value) <= MOST_LAYERS and all(n in (0, 1) for n in value)
    return several or _is_count(value, MOST_LAYERS)


def is_scaling(value: object) -> bool:
    """Whether it is how transformers says the scaling of a rotary embedding: a word, and numbers that are finite."""
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
WINDOW = Kind("a whole number, or two of which -1 is no bound", _is_window)
FREQUENCY = Kind(f"a whole number, or a list of 0 and 1, at most {MOST_LAYERS}", _is_frequency)

# By term. A term that is not here is no plain value, and is made by code that has looked at it.
KINDS: Mapping[str, Kind] = {
    "layers": _count(MOST_LAYERS),
    "experts": _count(MOST_EXPERTS),
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


def mistyped(said: dict[str, Said], kinds: Mapping[str, Kind] = KINDS) -> list[str]:
    """Take out of `said` what is not of its kind, and return it as problems; None says nothing.

    >>> found = {"layers": Said("three", "run_config.yaml: num_layers")}
    >>> mistyped(found), found
    (["run_config.yaml: num_layers = 'three': must be a whole number above zero, at most 10000"], {})
    """
    wrong = [
        name
        for name, one in said.items()
        if name in kinds and one.value is not None and not kinds[name].holds(one.value)
    ]
    return [f"{said.pop(name)}: must be {kinds[name].words}" for name in wrong]
