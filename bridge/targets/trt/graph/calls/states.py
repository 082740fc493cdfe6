"""States that convolutions and recurrent layers keep of the past.

They have a fixed size; zeros stand before the first token. transformers writes into them, in a graph each step gives
new ones.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

CONV, RECURRENT = "conv_state", "recurrent_state"  # as onnxruntime-genai names them


class _Given:
    """Layers that replace their states instead of writing into them, once a state is given."""

    conv_states: dict[int, Any]
    recurrent_states: dict[int, Any]
    has_previous_state: dict[int, bool]
    conv_kernel_size: dict[int, Any]

    def update_conv_state(self, conv_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        import torch

        if not self.has_previous_state[state_idx]:
            return super().update_conv_state(conv_states, state_idx, **kwargs)  # type: ignore[misc]
        full = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        self.conv_states[state_idx] = full[..., -self.conv_kernel_size[state_idx] :]
        return full

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        if not self.has_previous_state[state_idx]:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)  # type: ignore[misc]
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class StateLayer(_Given, LinearAttentionLayer):  # type: ignore[misc]  # transformers is not typed
    """A layer with states only."""


class StateAndKeysLayer(_Given, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer with states, keys and values."""


REPLACED = {LinearAttentionLayer: StateLayer, LinearAttentionAndFullAttentionLayer: StateAndKeysLayer}


def cache_of(config: Any) -> DynamicCache:
    """An empty cache with the layers of `config` if some have states, else one that grows by layers with keys alone."""
    try:
        kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    except (AttributeError, KeyError, TypeError, ValueError):  # a config without layers of known types
        kinds = []
    cache = DynamicCache()
    if any(kind in REPLACED for kind in kinds):
        cache.layers = [REPLACED.get(kind, DynamicLayer)() for kind in kinds]
        cache.layer_class_to_replicate = None
    return cache


def slots(layer: Any) -> list[tuple[str, Any]]:
    """Kind and tensor of everything that a layer keeps; [] if that has another form than these."""
    if type(layer) not in (DynamicLayer, *REPLACED.values()):
        return []
    kept = [("key", layer.keys), ("value", layer.values)] if isinstance(layer, DynamicLayer) else []
    if isinstance(layer, LinearAttentionLayer):
        if layer.number_of_states != 1:
            return []
        kept += [(CONV, layer.conv_states[0]), (RECURRENT, layer.recurrent_states[0])]
        kept = [(kind, tensor) for kind, tensor in kept if tensor is not None]
        return kept
    return kept if layer.keys is not None else []


def filled(kinds: list[list[str]], tensors: list[Any]) -> DynamicCache:
    """A cache that holds `tensors`, layer by layer, in the order of `slots`."""
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = [], DynamicLayer
    left = iter(tensors)
    for names in kinds:
        given = {name: next(left) for name in names}
        states, keys = given.keys() & {CONV, RECURRENT}, "key" in given
        layer = (StateAndKeysLayer if keys else StateLayer)() if states else DynamicLayer()
        if keys:
            layer.keys, layer.values, layer.is_initialized = given["key"], given["value"], True
        if states:
            layer.has_previous_state[0] = True
        if CONV in given:
            layer.conv_states[0], layer.is_conv_states_initialized[0] = given[CONV], True
            layer.conv_kernel_size[0] = given[CONV].shape[-1]
        if RECURRENT in given:
            layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = given[RECURRENT], True
        first = next(iter(given.values()))
        layer.dtype, layer.device = first.dtype, first.device
        cache.layers.append(layer)
    return cache
