"""What each layer of a decoder keeps of past tokens."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer


def cache_layers(config: Any) -> list[type]:
    """transformers' class of each layer's cache, by a config of its own; [] if that has no layers of known types."""
    try:
        return [type(layer) for layer in DynamicCache(config=config).layers]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def keeps_states(kind: type) -> bool:
    """Whether a layer keeps tensors of fixed size: of a convolution, a state-space model or linear attention."""
    return issubclass(kind, LinearAttentionLayer)


def keeps_keys(kind: type) -> bool:
    """Whether a layer keeps keys and values of all tokens."""
    return issubclass(kind, DynamicLayer)
