"""Qwen2-Audio, which masks spectra."""

from __future__ import annotations

from bridge.targets.onnx.export.family import Family

FAMILY = Family(masks_sound=True)
