"""Towers of texts beside images or sounds whose code reads data.

OWL-ViT gives each image a number of texts by a quotient of two axes, and CLAP fuses the parts of those sounds that are
long.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.methods.replace import Methods


def _detect(self: Any, input_ids: Any, pixel_values: Any, attention_mask: Any = None, **_: Any) -> dict[str, Any]:
    """Each image is asked for as many texts; those of the first come first. A remainder puts them out of bounds."""
    texts, features, _outputs = self.image_text_embedder(input_ids, pixel_values, attention_mask)
    images, rows = pixel_values.shape[0], input_ids.shape[0]
    queries = rows // images
    own = torch.arange(images)[:, None] * queries + torch.arange(queries) + (rows - images * queries) * rows
    patches = features.flatten(1, 2)
    logits, _embeds = self.class_predictor(patches, texts[own], input_ids[:, 0][own] > 0)
    found = {"logits": logits, "pred_boxes": self.box_predictor(patches, features)}
    if hasattr(self, "objectness_predictor"):
        found["objectness_logits"] = self.objectness_predictor(patches)
    return found


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


METHODS: Methods = {
    "OwlViTForObjectDetection": {"forward": _detect},
    "Owlv2ForObjectDetection": {"forward": _detect},
    "ClapAudioEncoder": {"forward": _hear},
    "ClapAudioPatchEmbed": {"forward": _embed_patches},
}
