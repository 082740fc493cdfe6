"""States that convolutions and recurrent layers keep of the past.

They have a fixed size; zeros stand before the first token. transformers writes into them, in a graph each step gives
new ones.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from bridge.sources.live_models.cache_layers import cache_layers
from bridge.targets.onnx.export.family import family_of

# Layers that versions before 5.14 and before 5.23 lack; no model of theirs has one.
DynamicIndexedLayer: Any = getattr(cache_utils, "DynamicIndexedLayer", type("DynamicIndexedLayer", (), {}))
DummyLayer: Any = getattr(cache_utils, "DummyLayer", type("DummyLayer", (), {}))

CONV, RECURRENT = "conv_state", "recurrent_state"  # as onnxruntime-genai names them
INDEXER = "indexer_key"  # by which sparse attention chooses tokens (DeepSeek V3.2): [batch, tokens, features]
GROWS = {"key": 2, "value": 2, INDEXER: 1}  # the axis of tokens; others have a fixed size
_ASKED: ContextVar[list[Any]] = ContextVar("the recurrent state that a layer asked for last, by head or whole")


class StateCache(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """Remembers the state that a layer asks for before it scans its tokens (`take_requested_state`)."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        state = super().get_recurrent_state(layer_idx, state_idx)
        # Zamba scans head by head
        _ASKED.set([] if state is None else list(state.unbind(1)) if state.dim() == 4 else [state])
        return state


def take_requested_state() -> Any:
    """The state from which the next scan goes on; None before the first token."""
    asked = _ASKED.get([])
    return asked.pop(0) if asked else None


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


# transformers' layer -> ours that takes its place
REPLACED: dict[type, type] = {
    LinearAttentionLayer: StateLayer,
    LinearAttentionAndFullAttentionLayer: StateAndKeysLayer,
    DynamicIndexedLayer: DynamicIndexedLayer,
    DummyLayer: DummyLayer,  # keeps nothing
}
OWN = (StateLayer, StateAndKeysLayer, DynamicIndexedLayer)  # what keeps more than keys and values


def cache_of(config: Any) -> DynamicCache:
    """An empty cache: of the layers of `config` if some keep more than keys, else one that grows by layers of these."""
    kinds, cache = cache_layers(config), _empty(config)
    if any(REPLACED.get(kind) in OWN for kind in kinds):
        cache.layers = [REPLACED.get(kind, DynamicLayer)() for kind in kinds]
        cache.layer_class_to_replicate = None
    return cache


def slots(layer: Any) -> list[tuple[str, Any]] | None:
    """Kind and tensor of everything that a layer keeps; None if that has another form than these."""
    if type(layer) is DummyLayer:
        return []
    if type(layer) not in (DynamicLayer, *OWN) or getattr(layer, "number_of_states", 1) != 1:
        return None
    kept = [("key", layer.keys), ("value", layer.values)] if isinstance(layer, DynamicLayer) else []
    if isinstance(layer, DynamicIndexedLayer):
        kept.append((INDEXER, layer.indexer_keys))
    if isinstance(layer, LinearAttentionLayer):
        kept += [(CONV, layer.conv_states[0]), (RECURRENT, layer.recurrent_states[0])]
    return [(kind, tensor) for kind, tensor in kept if tensor is not None] or None


def present(cache: Any) -> list[Any]:
    """Everything that the layers of a cache keep, in the order of `slots`."""
    return [tensor for layer in cache.layers for _, tensor in slots(layer) or []]


def _empty(config: Any) -> StateCache:
    own = family_of(config).cache
    cache: StateCache = own(StateCache) if own else StateCache()
    return cache


def filled(config: Any, kinds: list[list[str]], tensors: list[Any]) -> DynamicCache:
    """A cache that holds `tensors`, layer by layer, in the order of `slots`."""
    cache = _empty(config)
    cache.layers, cache.layer_class_to_replicate = [], DynamicLayer
    left = iter(tensors)
    for names in kinds:
        given = {name: next(left) for name in names}
        if not given:
            cache.layers.append(DummyLayer())
            continue
        states, keys = given.keys() & {CONV, RECURRENT}, "key" in given
        more = (StateAndKeysLayer if keys else StateLayer) if states else DynamicLayer
        layer = (DynamicIndexedLayer if INDEXER in given else more)()
        if keys:
            layer.keys, layer.values, layer.is_initialized = given["key"], given["value"], True
        if states:
            layer.has_previous_state[0] = True
        if CONV in given:
            layer.conv_states[0], layer.is_conv_states_initialized[0] = given[CONV], True
            layer.conv_kernel_size[0] = given[CONV].shape[-1]
        if RECURRENT in given:
            layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = given[RECURRENT], True
        if INDEXER in given:
            layer.indexer_keys, layer.is_indexer_initialized = given[INDEXER], True
        first = next(iter(given.values()))
        layer.dtype, layer.device = first.dtype, first.device
        cache.layers.append(layer)
    return cache
