"""InstructBLIP, whose decoder is that of BLIP-2."""

from __future__ import annotations

from bridge.targets.onnx.export.family import Family
from bridge.targets.onnx.families.blip_2 import Inner

FAMILY = Family(decoder=Inner, inner_decoder=True)
