"""What differs between the graphs of one family: sizes, frequencies, and kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.sources.configs.rope import FULL, SLIDING, Rope, rope_of
from bridge.targets.trt.graph.layers import Layers

# Entries of older versions of config.json, in place of `rope_parameters` and `layer_types`.
OLDER = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}
# Entries that no graph follows, beside those that say nothing of the model.
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "cache_implementation", "dtype",
    "eos_token_id", "initializer_range", "max_position_embeddings", "max_window_layers", "model_type", "pad_token_id",
    "pretraining_tp", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
SIZED = {
    "head_dim", "hidden_size", "intermediate_size", "layer_types", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "query_pre_attn_scalar", "rms_norm_eps", "rope_parameters", "sliding_window",
    "tie_word_embeddings", "vocab_size",
}  # fmt: skip
ROPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # kinds of rotary scaling, and the entries of each


@dataclass(frozen=True)
class Family:
    """A family of models with a template.

    `defaults`: transformers' own for what config.json leaves out. `sentinels`: variant -> the config that its graphs
    were exported with, whose sizes are found again because no two are equal. `every`: where `layer_types` is left out,
    each such layer attends to everything and the others to a window. `theta`: of positions, where the config has none.
    `others`: entry -> values beside the default with which the graph is the same.
    """

    architecture: str
    defaults: Mapping[str, Any]
    sentinels: Mapping[str, Mapping[str, Any]]
    every: int = 1
    theta: float = 1e4
    others: Mapping[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one model. `window`: None without one. `scale`: attention divides by its root."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    window: int | None
    scale: float
    eps: float
    rope: Rope
    context: int
    kinds: tuple[str, ...]
    tied: bool

    @property
    def variant(self) -> str:
        """Which graphs have the same operators: queries that share keys, and whether there is a window."""
        heads = "mha" if self.kv_heads == self.heads else "mqa" if self.kv_heads == 1 else "gqa"
        return heads if self.window is None else f"{heads}-window"

    @property
    def compared(self) -> tuple[str, ...]:
        """The kinds of the layers that an export has: those that it stamps the others from."""
        return tuple(self.kinds[layer] for layer in Layers("", self.kinds).chosen())

    @property
    def integers(self) -> tuple[int, ...]:
        """Numbers in shapes and constants, in an order that all models share."""
        widths = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.head_dim // 2)
        heads = (self.heads, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        return (self.hidden, *heads, *widths, self.intermediate, self.vocab, self.window or 0)

    def floats(self, rounded: Callable[[float], Any]) -> tuple[Any, ...]:
        """The root of `hidden` that Gemma's embeddings are multiplied by, epsilon, and the scale of attention.

        `rounded`: to the dtype of the graph. torch multiplies queries and keys each by the root of that scale.
        """
        scale = rounded(self.scale**-0.5)
        return (rounded(math.sqrt(self.hidden)), rounded(self.eps), scale, rounded(math.sqrt(scale)))


def sizes_of(config: Mapping[str, Any], family: Family) -> Sizes | None:
    """Read the sizes; None if the config has an entry, or a value, that the template does not follow."""
    for name, value in config.items():
        if name in WITHOUT_EFFECT or name in OLDER or value in family.others.get(name, ()):
            continue
        if name not in family.defaults or not (name in SIZED or _same(value, family.defaults[name])):
            return None
    try:
        sizes = read_sizes(config, family)
        return sizes if _fits(sizes) and _is_plain(config) else None
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError):
        return None  # whoever builds the model says what is wrong with its config


def read_sizes(config: Mapping[str, Any], family: Family) -> Sizes:
    """Read the sizes of a config whose other entries are the template's."""
    given = {**family.defaults, **config}
    hidden, heads = _whole(given["hidden_size"]), _whole(given["num_attention_heads"])
    head_dim = hidden // heads if given.get("head_dim") is None else _whole(given["head_dim"])
    kv_heads = heads if given.get("num_key_value_heads") is None else _whole(given["num_key_value_heads"])
    window = given.get("sliding_window") if given.get("use_sliding_window", True) else None
    return Sizes(
        hidden, heads, kv_heads, head_dim, _whole(given["intermediate_size"]), _whole(given["vocab_size"]),
        None if window is None else _whole(window), float(given.get("query_pre_attn_scalar") or head_dim),
        float(given["rms_norm_eps"]), rope_of(given, family.theta), _whole(given["max_position_embeddings"]),
        _kinds(given, family), bool(given["tie_word_embeddings"]),
    )  # fmt: skip


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no size")
    return value


def _kinds(given: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    layers, types = _whole(given["num_hidden_layers"]), given.get("layer_types")
    if types is None:
        every = _whole(given.get("sliding_window_pattern") or family.every)
        types = [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    if len(types) != layers:
        raise ValueError("layer_types has another number of layers")
    return tuple(types)


def _fits(sizes: Sizes) -> bool:
    """Whether the sizes are those of a model that has what the template has."""
    rope = sizes.rope
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *ROPES.get(rope.kind, ())}
    divides = sizes.hidden % sizes.heads == sizes.heads % sizes.kv_heads == sizes.head_dim % 2 == 0
    several = sizes.heads > 1 and sizes.head_dim > 2
    return divides and several and rope.kind in ROPES and rope.share == 1 and rope.scaling.keys() <= known


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Whether positions of layers with a window are not scaled."""
    local = (config.get("rope_parameters") or {}).get(SLIDING) or {}
    return local.get("rope_type", "default") == "default" and local.keys() <= {"rope_theta", "rope_type"}


def _same(value: Any, default: Any) -> bool:
    """Whether two values of an entry are the same to transformers."""
    return bool(value == default) or (value in (None, False) and default in (None, False))
