"""PaliGemma, in which all tokens of the prefix see each other."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from bridge.targets.onnx.export.calls.states import filled, present
from bridge.targets.onnx.export.calls.text import Flat
from bridge.targets.onnx.export.family import Family


class _Empty(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """A cache that says it is empty: only then does PaliGemma read which tokens are the prefix."""

    is_initialized = False


class _PrefixAtOnce(Flat):
    """A decoder in which all tokens of type 0 see each other: PaliGemma. Past tokens are of type 1 to those.

    It counts positions from 1, which a quantized cache shows: keys are rotated before they are rounded.
    """

    def forward(self, inputs: dict[str, Any], past: list[Any]) -> tuple[Any, ...]:
        types, cache = inputs["token_type_ids"], filled(self.model.config, self.kinds, past)
        whole = torch.cat([types.new_ones(types.shape[0], past[0].shape[2]), types], 1)
        cache.__class__ = _Empty
        given = {**inputs, "token_type_ids": whole, "position_ids": inputs["position_ids"] + 1}
        out = self.model(**given, past_key_values=cache, use_cache=True)
        return (out.logits, *present(out.past_key_values))


FAMILY = Family(decoder=_PrefixAtOnce, seen_by="token_type_ids")
