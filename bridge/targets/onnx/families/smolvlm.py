"""SmolVLM, which reads images as Idefics3 does."""

from __future__ import annotations

from bridge.targets.onnx.export.family import Family
from bridge.targets.onnx.families.idefics3 import features

FAMILY = Family(features=features)
