"""Gemma 3, in which the tokens of an image see each other."""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.calls.text import Flat
from bridge.targets.onnx.export.family import Family


class _ImagesAtOnce(Flat):
    """A decoder in which the tokens of an image see each other, also later ones: Gemma 3. Its inputs have the ids."""

    model: Any

    def forward(self, inputs: dict[str, Any], past: list[Any]) -> tuple[Any, ...]:
        ids = inputs["input_ids"]
        types = (ids == self.model.config.image_token_id).long()
        whole = torch.cat([types.new_zeros(ids.shape[0], past[0].shape[2]), types], 1)
        rest = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
        return super().forward({**rest, "token_type_ids": whole}, past)


FAMILY = Family(decoder=_ImagesAtOnce, seen_by="input_ids")
