"""Names of the files that hold a written model."""

from __future__ import annotations

from pathlib import Path

from bridge.targets.trt.graph.tasks import TASKS

WEIGHTS = "model.safetensors"  # of all graphs
MODEL = "model.onnx"
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
PARTS = {"encoder": ENCODER, "decoder": DECODER}  # part of a task -> its file


def files_of(task: str) -> dict[str, str]:
    """Part -> file of the graphs of a task; the part of a single graph is ""."""
    return {part: PARTS[part] for part in TASKS[task].parts} or {"": MODEL}


def graphs(directory: Path) -> list[Path]:
    """The ONNX files of a written model, in the order in which they run."""
    parts = [directory / file for file in PARTS.values()]
    return parts if all(path.is_file() for path in parts) else [directory / MODEL]
