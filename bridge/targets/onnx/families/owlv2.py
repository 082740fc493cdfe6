"""OWLv2, which detects as OWL-ViT does and scores each box."""

from __future__ import annotations

from bridge.targets.onnx.export.family import Family
from bridge.targets.onnx.families.owlvit import detect

FAMILY = Family(methods={"Owlv2ForObjectDetection": {"forward": detect}})
