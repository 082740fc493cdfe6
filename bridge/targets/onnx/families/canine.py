"""Encoders of characters: CANINE.

transformers cuts a text into windows in a Python loop, and counts how often the last block of characters is repeated.
Here windows are an axis, and each character finds its block by an index.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.family import Family


def _attend(
    self: Any, hidden_states: Any, attention_mask: Any = None, output_attentions: bool = False
) -> tuple[torch.Tensor]:
    """Characters attend within their window; behind the last character of the text there is nothing to attend to."""
    if not self.local:
        whole: tuple[torch.Tensor] = type(self).forward(self, hidden_states, attention_mask, output_attentions)
        return whole
    batch, length, features = hidden_states.shape
    width = self.attend_from_chunk_width
    count = (length + width - 1) // width
    places = torch.arange(count)[:, None] * width + torch.arange(width)
    inside = places.minimum(torch.arange(length).amax(0))
    states = hidden_states.index_select(1, inside.flatten()).reshape(batch * count, width, features)
    seen = attention_mask[:, 0].index_select(1, inside.flatten()).unflatten(1, (count, width))
    seen = seen.masked_fill(places >= length, -torch.inf).reshape(batch * count, 1, width)  # 1 - it is what hides
    made = self.self(states, states, seen.expand(-1, width, -1))[0]
    made = made.reshape(batch, count * width, features).index_select(1, torch.arange(length))
    return (self.output(made, hidden_states),)


def _repeat(self: Any, molecules: Any, char_seq_length: Any) -> Any:
    """The block of each character; the first is the text's own, and the last characters have the last."""
    block = torch.arange(char_seq_length) // self.config.downsampling_rate + 1
    return molecules.index_select(1, block.minimum(torch.arange(molecules.shape[1]).amax(0)))


def _block_mask(self: Any, char_attention_mask: Any, downsampling_rate: int) -> Any:
    """Blocks with a character of the text; torch's pool of one axis takes its extent as a Python number."""
    blocks = char_attention_mask.shape[1] // downsampling_rate
    whole = char_attention_mask.float().index_select(1, torch.arange(blocks * downsampling_rate))
    return whole.unflatten(1, (blocks, downsampling_rate)).amax(-1)


FAMILY = Family(
    methods={
        "CanineAttention": {"forward": _attend},
        "CanineModel": {"_repeat_molecules": _repeat, "_downsample_attention_mask": _block_mask},
    }
)
