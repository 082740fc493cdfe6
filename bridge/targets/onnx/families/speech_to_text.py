"""Speech2Text, which reads spectra of any length, masked as `moonshine` says."""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.calls.sound import SoundMasks
from bridge.targets.onnx.export.family import Family


def _settle(model: Any) -> None:
    for module in (model.model, model.model.encoder):
        module._get_feature_vector_attention_mask = lambda length, mask: mask


def _by_length(model: Any, mask: Any) -> Any:
    count = model._get_feat_extract_output_lengths
    return (torch.arange(count(mask.shape[-1])) < count(mask.sum(-1))[:, None]).long()


FAMILY = Family(sound=SoundMasks(_settle, _by_length, lambda mask: mask))
