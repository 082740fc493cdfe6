"""Ovis 2, with its own embeddings of the tokens around images."""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.calls.multimodal import Embedding
from bridge.targets.onnx.export.family import Family


class _Indicators(Embedding):
    """Where images are, Ovis 2 has embeddings of its own for the tokens around them: the last of its table."""

    def forward(self, input_ids: Any, features: Any, deep: Any = None) -> tuple[Any, ...]:
        (embeds,) = super().forward(input_ids, features, deep)
        model = self.model.model
        shown = features.new_ones(features.shape[0]).sum() > 0
        first = model.visual_vocab_size - model.vision_tower.num_visual_indicator_tokens
        for number, token in enumerate(model.visual_indicator_token_ids):
            own = model.visual_embeddings_table(torch.tensor([first + number]))
            embeds = torch.where(((input_ids == token) & shown)[..., None], own.to(embeds.dtype), embeds)
        return (embeds,)


FAMILY = Family(embedding=_Indicators)
