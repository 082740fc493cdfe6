"""Fill an exported graph with a live model's weights and run it in ONNX Runtime; shared by the graph tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
import transformers

from bridge.targets.onnx.export.float_graph import Graph
from bridge.targets.onnx.run.runtime import empty_extents


def live_model(config: Any, seed: int = 0) -> Any:
    """Build the config's architecture with weights large enough that attention and routing matter."""
    torch.manual_seed(seed)
    model = getattr(transformers, config.architectures[0])(config).eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = noise * 0.2 if parameter.dim() > 1 else parameter.data + noise * 0.1
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point():
            buffer += torch.rand_like(buffer) * 0.3  # batch-norm statistics stay positive
    return model


def live_tensor(state: dict[str, torch.Tensor], expression: str) -> torch.Tensor:
    """Evaluate a weight's live expression: `name`, `stack[e]`, or `stack[e, gate]`."""
    match = re.fullmatch(r"(.+)\[(\d+)(?:, (gate|up))?\]", expression)
    if match is None:
        return state[expression]
    one = state[match[1]][int(match[2])]
    return one if match[3] is None else one.chunk(2, dim=0)[match[3] == "up"]


def fill(graph: Graph, model: Any, folder: Path) -> ort.InferenceSession:
    """Give every weight its data, save, and open without ONNX Runtime's fusions."""
    state = model.state_dict()
    for name, expression in graph.weights.items():
        value = graph.model.graph.initializers[name]
        tensor = live_tensor(state, expression).detach().float()
        assert value.shape is not None and value.dtype is not None
        assert tuple(tensor.shape) == tuple(value.shape.numpy()), name
        value.const_value = ir.tensor(tensor.contiguous().numpy().astype(value.dtype.numpy()), name=name)
    ir.save(graph.model, folder / "model.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run with the inputs that the session has; caches not given are empty ones, of past length 0."""
    batch = next(iter(feeds.values())).shape[0]
    wanted: dict[str, Any] = {}
    for spec in session.get_inputs():
        if spec.name.startswith("past_key_values.") and spec.name not in feeds:
            kind = np.float16 if spec.type == "tensor(float16)" else np.float32
            wanted[spec.name] = np.zeros(empty_extents(spec.shape, batch), kind)
        else:
            wanted[spec.name] = feeds[spec.name]
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, wanted), strict=True))


def padded_batch() -> tuple[np.ndarray, np.ndarray]:
    """Two rows of 19 tokens, longer than every sliding window here; the second starts with 6 of padding."""
    ids = np.random.default_rng(0).integers(3, 101, (2, 19))
    mask = np.ones_like(ids)
    mask[1, :6] = 0
    return ids, mask


def positions(mask: np.ndarray) -> np.ndarray:
    return np.maximum(mask.cumsum(1) - 1, 0)


def torch_logits(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
    with torch.no_grad():
        logits = model(**{name: torch.tensor(array) for name, array in feeds.items()}, use_cache=False).logits
    return np.asarray(logits)


def in_chunks(session: ort.InferenceSession, ids: np.ndarray, mask: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Feed `ids` in chunks of `sizes`, each with the caches of those before; return all logits."""
    past: dict[str, np.ndarray] = {}
    logits, start = [], 0
    for size in sizes:
        stop = start + size
        feeds = {"input_ids": ids[:, start:stop], "position_ids": positions(mask)[:, start:stop]}
        out = run(session, {**feeds, "attention_mask": mask[:, :stop], **past})
        logits.append(out.pop("logits"))
        past = {name.replace("present", "past_key_values"): value for name, value in out.items()}
        start = stop
    return np.concatenate(logits, 1)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    return float(np.abs(got - want).max() / np.abs(want).max())
