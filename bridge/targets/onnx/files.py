"""Names of the files of a written model, and of their parts."""

from __future__ import annotations

from pathlib import Path

from bridge.targets.tasks import tasks

WEIGHTS = "model.safetensors"  # of all graphs
MODEL = "model.onnx"
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
VISION, SPEECH, EMBEDDING = "vision.onnx", "speech.onnx", "embedding.onnx"
# Part of a task -> its file, in the order in which they run.
PARTS = {"encoder": ENCODER, "vision": VISION, "speech": SPEECH, "embedding": EMBEDDING, "decoder": DECODER}
GENAI = "genai_config.json"
UNKNOWN = "encoder-decoder"  # the type of encoder-decoders in it of which onnxruntime-genai knows none
# Inputs of a tower of tiles: each row is a sum of some features.
TILE_ROWS, TILE_WEIGHTS = "feature_rows", "feature_weights"


def files_of(task: str) -> dict[str, str]:
    """Part -> file of the graphs of a task; the part of a single graph is ""."""
    return {part: PARTS[part] for part in tasks()[task].parts} or {"": MODEL}


def graphs(directory: Path) -> list[Path]:
    """The ONNX files of a written model, in the order in which they run."""
    parts = [path for file in PARTS.values() if (path := directory / file).is_file()]
    return parts if len(parts) > 1 else [directory / MODEL]


def is_multimodal(directory: Path) -> bool:
    """True for the graphs of a model that sees or hears, and writes."""
    return (directory / EMBEDDING).is_file()
