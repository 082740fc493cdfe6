"""Compare what a live model computes with what its checkpoint states.

Two models may have equal names and shapes, and yet read the same weights otherwise: 16 heads of 16, or 8 of 32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bridge.sources.configs.rope import rope_of
from bridge.tables.architectures.meaning import ACTIVATION, EPSILON, SPELLED, shared

Problem = tuple[str, str]

COUNTS = ("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok", "rotary_dim")
ROPE = ("rope_parameters", "rope_scaling", "rope_theta")  # of transformers 5, and of older versions
SAME = SPELLED | {"gelu_pytorch_tanh": "gelu_new"}  # names of one function
CLOSE = 1e-6  # GGUF files hold float32


def unlike_config(config: Any, given: Mapping[str, Any], where: str = "config") -> Iterator[Problem]:
    """Yield fields of a model's configuration that the checkpoint's has otherwise; only what both state.

    The checkpoint's is read as the model's own class reads it: older names, and rotary entries of older versions.
    """
    ours, theirs = config.to_dict(), _as_class(config, given)
    aliases: Mapping[str, str] = getattr(config, "attribute_map", {})
    meant = [name for name, what in shared().section("meaning").items() if what in (ACTIVATION, EPSILON)]
    for word in dict.fromkeys((*COUNTS, "rms_norm_eps", *meant)):
        own = aliases.get(word, word)
        if word in given or own in given:
            yield from _unlike(f"{where}.{word}", ours.get(own), theirs.get(own))
    if any(given.get(name) for name in ROPE):
        yield from _unlike(f"{where}.rope_parameters", ours.get("rope_parameters"), theirs.get("rope_parameters"))
    for name in getattr(config, "sub_configs", {}):
        if isinstance(given.get(name), Mapping) and getattr(config, name, None) is not None:
            yield from unlike_config(getattr(config, name), given[name], f"{where}.{name}")


def _as_class(config: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checkpoint's configuration of the model's class; as it is if that class does not take it."""
    own = {key: value for key, value in given.items() if key != "quantization_config"}
    try:
        read: Mapping[str, Any] = type(config).from_dict(own).to_dict()
    except Exception:
        return given
    return read


def _unlike(name: str, ours: Any, other: Any) -> Iterator[Problem]:
    if isinstance(ours, Mapping) and isinstance(other, Mapping):
        ours, other = ({"rope_type": "default"} | dict(one) for one in (ours, other))
        for key in ours.keys() & other.keys():
            yield from _unlike(f"{name}.{key}", ours[key], other[key])
    elif ours is not None and other is not None and not _equal(ours, other):
        yield (
            name,
            f"is {ours} in the model, {other} in the checkpoint; build the model from the checkpoint's "
            "config, or give config= with the field if that is meant",
        )


def _equal(ours: Any, other: Any) -> bool:
    if isinstance(ours, int | float) and isinstance(other, int | float):
        return math.isclose(ours, other, rel_tol=CLOSE)
    if isinstance(ours, str) and isinstance(other, str):
        return SAME.get(ours, ours) == SAME.get(other, other)
    return bool(ours == other)


def unlike_titan(modules: Sequence[Any], given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what modules of torchtitan's have otherwise than the checkpoint's config."""
    found: dict[str, Any] = {}
    for module in (inner for model in modules for inner in model.modules()):
        if hasattr(module, "n_kv_heads"):
            found |= {"num_key_value_heads": module.n_kv_heads, "head_dim": getattr(module, "head_dim", None)}
        if hasattr(module, "n_heads"):
            found["num_attention_heads"] = module.n_heads
        if hasattr(module, "top_k"):
            found["num_experts_per_tok"] = module.top_k
    for model in modules:
        found["rms_norm_eps"] = getattr(getattr(model, "norm", None), "eps", found.get("rms_norm_eps"))
    for word, ours in found.items():
        yield from _unlike(f"config.{word}", ours, given.get(word))
    if stated := rope_of(given, theta=0.0).theta:
        for theta in sorted({theta for model in modules for theta in _thetas(model)}):
            yield from _unlike("config.rope_parameters.rope_theta", theta, stated)


def _thetas(model: Any) -> Iterator[float]:
    """The bases of a model's rotary positions: of its arguments (0.2), or of its modules (0.3)."""
    if (theta := getattr(getattr(model, "model_args", None), "rope_theta", None)) is not None:
        yield float(theta)
    configs: list[Any] = [inner.config for inner in model.modules() if type(inner).__name__.endswith("RoPE")]
    yield from (float(config.theta) for config in configs)
