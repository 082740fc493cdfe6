"""Moonshine, which reads sounds of any length.

Rows of a batch are padded; the encoder turns their mask into that of its states, which the decoder reads. transformers
cuts it by lengths that it counts in Python: here it is made before the model runs.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.calls.sound import SoundMasks
from bridge.targets.onnx.export.family import Family

STRIDE = 64 * 3 * 2  # samples from one state to the next


def _settle(model: Any) -> None:
    model.model.encoder._get_feat_extract_output_lengths = lambda samples: samples // STRIDE


def _every_state(model: Any, mask: Any) -> Any:
    samples = mask.shape[-1]
    convolved = ((samples - 127) // 64 - 6) // 3 + 1
    return mask.index_select(-1, torch.arange((convolved - 3) // 2 + 1) * STRIDE)


def _samples(mask: Any) -> Any:
    """A mask of samples, of which transformers takes the first of each stride."""
    return mask[..., None].expand(-1, -1, STRIDE).flatten(1)


FAMILY = Family(sound=SoundMasks(_settle, _every_state, _samples))
