"""OpenVINO and onnx-graphsurgeon on written graphs, in a process of their own: python other_runtimes.py TOOL < jobs.

Reads and prints JSON: directories with `model.onnx`, and .npz files of inputs; the outputs go to other .npz files.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

# The options that make OpenVINO exact: no bfloat16 sums, no activations quantized at run time.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def openvino(job: dict[str, Any]) -> None:
    """Run the graph; keep its first output."""
    import openvino as ov

    compiled = ov.Core().compile_model(f"{job['directory']}/model.onnx", "CPU", EXACT)
    np.savez(job["outputs"], first=compiled(dict(np.load(job["inputs"])))[0])


def graphsurgeon(job: dict[str, Any]) -> None:
    """Import the graph, clean it up, and export it beside its weights."""
    import onnx
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(onnx.load(f"{job['directory']}/model.onnx"))
    graph.cleanup().toposort()
    onnx.save(gs.export_onnx(graph), job["outputs"])


if __name__ == "__main__":
    tool = {"openvino": openvino, "graphsurgeon": graphsurgeon}[sys.argv[1]]
    for one in json.load(sys.stdin):
        tool(one)
