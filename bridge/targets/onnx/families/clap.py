"""CLAP, which fuses the parts of those sounds that are long."""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.family import Family


def _hear(self: Any, input_features: Any, is_longer: Any = None, **given: Any) -> Any:
    self.patch_embed.is_longer, self.enable_fusion = is_longer, False  # it would look for the rows that are longer
    return type(self).forward(self, input_features, **given)


def _embed_patches(self: Any, hidden_states: Any, is_longer_idx: Any = None) -> Any:
    """Fuses all rows, and takes what came of those that are longer."""
    del is_longer_idx
    states = self.proj(hidden_states[:, :1] if self.enable_fusion else hidden_states)
    if self.enable_fusion:
        parts = [self.mel_conv2d(part) for part in hidden_states[:, 1:].split(1, 1)]
        local = torch.cat(parts, -1)
        local = torch.nn.functional.pad(local, (0, states.shape[-1] - local.shape[-1]))
        states = torch.where(self.is_longer[:, :, None, None], self.fusion_model(states, local), states)
    return self.norm(states.flatten(2).transpose(1, 2) if self.flatten else states)


FAMILY = Family(methods={"ClapAudioEncoder": {"forward": _hear}, "ClapAudioPatchEmbed": {"forward": _embed_patches}})
