"""DeepSeek-V2: complex rotary embeddings."""

from __future__ import annotations

from bridge.targets.onnx.export.family import Family

FAMILY = Family(heads_axis={"DeepseekV2RotaryEmbedding": 1})
