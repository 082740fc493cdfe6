"""What layers of a cache keep, as inputs of a graph and back."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from bridge.targets.onnx.export.calls.states import CONV, GROWS, INDEXER, RECURRENT, filled, slots

TENSORS = {
    "key": torch.ones(2, 3, 5, 4), "value": torch.ones(2, 3, 5, 4), INDEXER: torch.ones(2, 5, 7),
    CONV: torch.ones(2, 6, 3), RECURRENT: torch.ones(2, 6, 8),
}  # fmt: skip


@pytest.mark.parametrize(
    "kinds", [["key", "value"], ["key", "value", INDEXER], [CONV], ["key", "value", CONV, RECURRENT], []]
)
def test_a_layer_keeps_what_it_was_given(kinds: list[str]) -> None:
    (layer,) = filled(None, [kinds], [TENSORS[kind] for kind in kinds]).layers
    kept = slots(layer)
    assert kept is not None
    assert [kind for kind, _ in kept] == kinds
    assert all(tensor is TENSORS[kind] for kind, tensor in kept)


def test_the_keys_of_an_indexer_grow_along_their_tokens() -> None:
    cache = filled(None, [["key", "value", INDEXER]], [TENSORS[kind] for kind in ("key", "value", INDEXER)])
    assert type(cache.layers[0]) is DynamicIndexedLayer
    whole = cache.update_indexer(torch.zeros(2, 1, 7), 0)
    assert whole.shape[GROWS[INDEXER]] == 6 and whole[:, :5].all() and not whole[:, 5:].any()


def test_a_layer_of_another_form_has_no_slots() -> None:
    class Other(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
        """It may keep more."""

    assert slots(Other()) is None
