"""LLaVA-NeXT, whose images are tiles."""

from __future__ import annotations

from bridge.targets.onnx.export.family import Family

FAMILY = Family(tiles=1)
