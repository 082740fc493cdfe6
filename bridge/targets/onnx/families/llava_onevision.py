"""LLaVA-OneVision, whose images are tiles that it resamples."""

from __future__ import annotations

from bridge.targets.onnx.export.family import Family

FAMILY = Family(tiles=4)
