"""Runs a written model on fixed inputs and keeps samples: of its output, and of what its first matrices got and made.

Where the target's runtime cannot run here (no GPU, no package, not the memory), `Reference.not_run` says why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import CannotRun
from bridge.finish import check_fits, check_on_disk
from bridge.golden.digests import positions
from bridge.golden.values import Reference
from bridge.planning import Plan, Step
from bridge.targets import load_target
from bridge.verification import FLOAT_ERROR

POSITIONS = 64  # tokens: a wrong RoPE permutation shows only after some twenty
MODULES = 16  # matrices of the first layers: two layers of a Llama have fourteen
INNER, OUTER = 256, 1024  # values kept of each matrix's input and output, and of the model's
# A code of an activation that flips at a tie costs 1e-2 at its position (bridge.verification), on another machine too.
FLIPS = 2e-2


def reference(
    directory: Path, plan: Plan, inputs: Mapping[str, np.ndarray] | None = None, tolerance: float | None = None
) -> Reference:
    """Run what `directory` holds on `inputs`, by default on ones that only its config decides."""
    try:
        check_on_disk(directory)
        check_fits(plan, "the golden holds bytes alone")
        feeds = dict(inputs) if inputs else _inputs(directory)
        values, ran = _run(directory, plan, feeds)
    except CannotRun as error:
        return Reference(not_run=str(error))
    dynamic = any(step.format and step.format.input for step in plan.steps) or any(step.kv for step in plan.steps)
    allowed = tolerance if tolerance is not None else FLIPS if dynamic else FLOAT_ERROR
    return Reference(feeds, values, ran, allowed)


def _inputs(directory: Path) -> dict[str, np.ndarray]:
    """Token ids, or an image, drawn by a hash: the same on every machine and in every version of NumPy."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    vocabulary, side = config.get("vocab_size"), config.get("image_size")
    if isinstance(vocabulary, int):
        count = min(POSITIONS, config.get("max_position_embeddings") or POSITIONS)
        return {"input_ids": (_drawn(count) % vocabulary).astype(np.int64).reshape(1, -1)}
    if isinstance(side, int):
        channels = config.get("num_channels", 3)
        pixels = _drawn(channels * side * side).astype(np.float64) / 2**32 * 2 - 1
        return {"pixel_values": pixels.astype(np.float32).reshape(1, channels, side, side)}
    raise CannotRun("config.json has neither vocab_size nor image_size to make inputs from; pass inputs=")


def _drawn(count: int) -> np.ndarray:
    drawn: np.ndarray = np.frombuffer(hashlib.shake_256(b"golden").digest(4 * count), "<u4")
    return drawn


def _run(directory: Path, plan: Plan, feeds: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], str]:
    runtime = load_target(plan.target).runtime(directory)
    steps = _first_matrices(plan)
    model = getattr(runtime, "model", None)
    if model is not None:
        inner, out = _hooked(runtime, model, list(steps), feeds)
    elif plan.target == "trt":
        inner, out = _tapped(directory, steps, feeds)
    else:
        inner, out = {}, runtime.run(feeds)[runtime.outputs[0]]
    values = {name: _sample(name, array, INNER) for name, array in inner.items()}
    return values | {"output": _sample("output", out, OUTER)}, runtime.twin


def _first_matrices(plan: Plan) -> dict[str, Step]:
    """The first modules in the order of the layers."""
    sited = [step for step in plan.steps if step.site and step.inputs and step.site.layout != "stack"]
    sited.sort(key=lambda step: (step.site is None or step.site.layer is None, (step.site and step.site.layer) or 0))
    return {step.site.module: step for step in sited[:MODULES] if step.site}


def _hooked(
    runtime: Any, model: Any, modules: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A `transformers` model: what goes into modules and comes out of them, by hooks that are removed again."""
    found: dict[str, np.ndarray] = {}
    known = dict(model.named_modules())

    def keep(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            for what, value in (("input", args[0]), ("output", output)):
                found[f"{name} {what}"] = value.detach().float().numpy()

        return hook

    hooks = [
        known[spelled].register_forward_hook(keep(name))
        for name in modules
        for spelled in (name, f"{model.base_model_prefix}.{name}")
        if spelled in known
    ]
    try:
        out = np.asarray(runtime.run(feeds)[runtime.outputs[0]])
    finally:
        for hook in hooks:
            hook.remove()
    return found, out


def _tapped(
    directory: Path, steps: Mapping[str, Step], feeds: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """An ONNX file: inner values of the graph as further outputs."""
    from bridge.graph.damage import places
    from bridge.graph.runtime import Runtime

    taps = {
        f"{module} {what}": value
        for module, (x, y, _) in places(directory / "model.onnx", steps)
        for what, value in (("input", x), ("output", y))
    }
    runtime = Runtime(directory, taps=list(dict.fromkeys(taps.values())))
    made = runtime.run(feeds)
    return {name: made[value] for name, value in taps.items()}, made[runtime.outputs[0]]


def _sample(name: str, array: np.ndarray, count: int) -> np.ndarray:
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    kept: np.ndarray = flat[positions(name, flat.size, count)]
    return kept
