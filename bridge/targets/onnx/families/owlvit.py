"""OWL-ViT, where texts per image are a quotient of two axes."""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.family import Family


def detect(self: Any, input_ids: Any, pixel_values: Any, attention_mask: Any = None, **_: Any) -> dict[str, Any]:
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


FAMILY = Family(methods={"OwlViTForObjectDetection": {"forward": detect}})
