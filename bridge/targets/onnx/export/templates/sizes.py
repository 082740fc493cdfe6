"""Sizes, frequencies and kinds of layers, which differ within a family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.sources.configs.rope import Rope
from bridge.tables.architectures.arch import ArchTable, load_arch
from bridge.tables.architectures.meaning import FULL, SLIDING, as_read, malformed_rope, not_followed, not_known
from bridge.targets.onnx.export.layers import Layers
from bridge.targets.onnx.export.templates.rotary import read_rope

# Fields, beside those of the sizes, whose values a template follows.
FOLLOWED = frozenset({
    "layer_types", "query_pre_attn_scalar", "rms_norm_eps", "sliding_window", "sliding_window_pattern",
    "tie_word_embeddings",
})  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Family:
    """A family of models with a template.

    `defaults`: transformers' own for what config.json leaves out. `sentinels`: variant -> the config that its graphs
    were exported with, whose sizes are found again because no two are equal. `full_every`: where `layer_types` is left
    out, each such layer attends to everything and the others to a window. `theta`: of positions, where the config has
    none. `local_theta`: whether layers with a window have a theta of their own. `same_graph`: entry -> values beside
    the default with which the graph is the same. `made_with`: package -> version of what exported the graphs.
    """

    architecture: str
    defaults: Mapping[str, Any]
    sentinels: Mapping[str, Mapping[str, Any]]
    full_every: int = 1
    theta: float = 1e4
    local_theta: bool = False
    same_graph: Mapping[str, list[Any]] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)


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
    scale: int
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
    def exported_kinds(self) -> tuple[str, ...]:
        """The kinds of the layers that an export has: those that it stamps the others from."""
        return tuple(self.kinds[layer] for layer in Layers("", self.kinds).representatives())

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
    """Read the sizes; None if the config has an entry, or a value, that the template does not follow.

    Whatever is unusual is declined: the export knows what it means, and says what is wrong with it.
    """
    table = load_arch(family.architecture)
    same = {name: values for name, values in family.same_graph.items() if name in config}
    if not table or any(malformed_rope(config)):
        return None
    config = as_read({n: v for n, v in config.items() if not any(_same(v, one) for one in same.get(n, []))}, table)
    if not _is_followed(config, table):
        return None
    if any(not _is_token(config.get(name), config.get("num_hidden_layers")) for name in TOKENS):
        return None
    try:
        sizes = read_sizes(config, family)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError):
        return None
    pad = config.get("pad_token_id", family.defaults.get("pad_token_id"))
    if pad is not None and not (type(pad) is int and -sizes.vocab <= pad < sizes.vocab):
        return None
    divides = sizes.hidden % sizes.heads == sizes.heads % sizes.kv_heads == sizes.head_dim % 2 == 0
    return sizes if divides and sizes.heads > 1 and sizes.head_dim > 2 and sizes.scale > 1 else None


def read_sizes(config: Mapping[str, Any], family: Family) -> Sizes:
    """Read the sizes of a config whose other entries are the template's; ValueError for one of another type."""
    given = {**family.defaults, **config}
    hidden, heads = _whole(given["hidden_size"]), _whole(given["num_attention_heads"])
    head_dim = hidden // heads if _may_be_left_out("head_dim", given, family) else _whole(given["head_dim"])
    alone = _may_be_left_out("num_key_value_heads", given, family)
    window = given.get("sliding_window") if given.get("use_sliding_window", True) else None
    eps, tied = given["rms_norm_eps"], given["tie_word_embeddings"]
    if type(eps) is not float or not 0 < eps < math.inf or type(tied) is not bool:
        raise ValueError(f"rms_norm_eps {eps!r}, tie_word_embeddings {tied!r}")
    return Sizes(
        hidden=hidden,
        heads=heads,
        kv_heads=heads if alone else _whole(given["num_key_value_heads"]),
        head_dim=head_dim,
        intermediate=_whole(given["intermediate_size"]),
        vocab=_whole(given["vocab_size"]),
        window=None if window is None else _whole(window),
        scale=_whole(given.get("query_pre_attn_scalar", head_dim)),
        eps=eps,
        rope=read_rope(given, family.theta, family.local_theta),
        context=_whole(given["max_position_embeddings"]),
        kinds=_kinds(given, family),
        tied=tied,
    )


def _is_followed(config: Mapping[str, Any], table: ArchTable) -> bool:
    """Whether the template has what the entries ask for: no row that others lack, and no number but the sizes."""
    switches = table.config.keys() - table.computes.keys() - table.sized - FOLLOWED
    if not all(_same(config.get(name, table.config[name]), table.config[name]) for name in switches):
        return False
    of = table, table.architectures[0], config
    return not any(not_followed(*of, FOLLOWED)) and not not_known(*of)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _is_token(value: Any, layers: Any) -> bool:
    """Whether a token is a number or several; as many as there are layers are taken for one a layer by an export."""
    ids = value if isinstance(value, list) else [value] if value is not None else []
    return all(type(one) is int for one in ids) and not (isinstance(value, list) and len(value) == layers)


def _may_be_left_out(name: str, given: Mapping[str, Any], family: Family) -> bool:
    return given.get(name) is None and family.defaults.get(name) is None


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"invalid size {value!r}")
    return value


def _kinds(given: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    layers, types = _whole(given["num_hidden_layers"]), given.get("layer_types")
    if types is None:
        every = _whole(given.get("sliding_window_pattern", family.full_every))
        types = [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    if len(types) != layers:
        raise ValueError("layer_types has another number of layers")
    return tuple(types)
