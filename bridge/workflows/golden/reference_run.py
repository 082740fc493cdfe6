"""Run a written model on fixed inputs and sample its values.

If the target's runtime cannot run here (no GPU, no package, too little memory), `Reference.not_run` says why.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import CannotRun
from bridge.planning.plan import Plan, Step
from bridge.targets import load_target
from bridge.verification.outputs import FLOAT_ERROR
from bridge.verification.verify import check_fits, check_on_disk
from bridge.workflows.golden.store import Reference, positions

POSITIONS = 64  # tokens: a wrong RoPE permutation shows only after about twenty
MAX_MODULES = 16  # matrices of the first layers: two layers of a Llama have fourteen
INNER, OUTER = 256, 1024  # samples of each matrix's input and output, and of the model's output
# An activation code that flips at a tie, as it may on another machine, costs 1e-2 at its position
# (bridge.verification.tensors).
FLIP_TOLERANCE = 2e-2


def reference(
    directory: Path, plan: Plan, inputs: Mapping[str, np.ndarray] | None = None, tolerance: float | None = None
) -> Reference:
    """Run the model of `directory` on `inputs`; by default on inputs derived from its config."""
    try:
        check_on_disk(directory)
        check_fits(plan, "the golden records bytes only")
        feeds = dict(inputs) if inputs else _inputs(directory)
        values, ran = _run(directory, plan, feeds)
    except CannotRun as error:
        return Reference(not_run=str(error))
    quantized_inputs = any(step.format and step.format.input for step in plan.steps) or any(s.kv for s in plan.steps)
    if tolerance is None:
        tolerance = FLIP_TOLERANCE if quantized_inputs else FLOAT_ERROR
    return Reference(feeds, values, ran, tolerance)


def _inputs(directory: Path) -> dict[str, np.ndarray]:
    """Token ids, or an image, drawn with a hash: the same on every machine and in every version of NumPy."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    vocabulary, side = config.get("vocab_size"), config.get("image_size")
    if isinstance(vocabulary, int):
        count = min(POSITIONS, config.get("max_position_embeddings") or POSITIONS)
        return {"input_ids": (_random(count) % vocabulary).astype(np.int64).reshape(1, -1)}
    if isinstance(side, int):
        channels = config.get("num_channels", 3)
        pixels = _random(channels * side * side).astype(np.float64) / 2**32 * 2 - 1
        return {"pixel_values": pixels.astype(np.float32).reshape(1, channels, side, side)}
    raise CannotRun("config.json has neither vocab_size nor image_size to make inputs from; pass inputs=")


def _random(count: int) -> np.ndarray:
    values: np.ndarray = np.frombuffer(hashlib.shake_256(b"golden").digest(4 * count), "<u4")
    return values


def _run(directory: Path, plan: Plan, feeds: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], str]:
    runtime = load_target(plan.target).runtime(directory)
    steps = _first_matrices(plan)
    model = getattr(runtime, "model", None)
    if model is not None:
        inner, out = _run_with_hooks(runtime, model, list(steps), feeds)
    elif plan.target in ("trt", "ort"):
        inner, out = _run_with_taps(directory, steps.values(), feeds)
    else:
        inner, out = {}, runtime.run(feeds)[runtime.outputs[0]]
    values = {name: _sample(name, array, INNER) for name, array in inner.items()}
    return values | {"output": _sample("output", out, OUTER)}, runtime.substitute


def _first_matrices(plan: Plan) -> dict[str, Step]:
    """The first modules in layer order."""
    sited = [(step.site, step) for step in plan.steps if step.site and step.inputs and step.site.layout != "stack"]
    sited.sort(key=lambda pair: math.inf if pair[0].layer is None else pair[0].layer)
    return {site.module: step for site, step in sited[:MAX_MODULES]}


def _run_with_hooks(
    runtime: Any, model: Any, modules: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs and outputs of modules of a `transformers` model, and its output; the hooks are removed afterwards."""
    values: dict[str, np.ndarray] = {}
    known = dict(model.named_modules())

    def record(name: str, module: Any, args: tuple[Any, ...], output: Any) -> None:
        for what, value in (("input", args[0]), ("output", output)):
            values[f"{name} {what}"] = value.detach().float().numpy()

    with ExitStack() as hooks:
        for name in modules:
            for spelled in (name, f"{model.base_model_prefix}.{name}"):
                if spelled in known:
                    hooks.enter_context(known[spelled].register_forward_hook(partial(record, name)))
        return values, np.asarray(runtime.run(feeds)[runtime.outputs[0]])


def _run_with_taps(
    directory: Path, steps: Iterable[Step], feeds: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inner values of an ONNX file, as additional outputs, and its output."""
    from bridge.targets.onnx.run.encoder_decoder import feeds_of
    from bridge.targets.onnx.run.layer_error import places
    from bridge.targets.onnx.run.runtime import Runtime

    of_steps = list(steps)
    tapped: dict[str, np.ndarray] = {}
    for path, given in feeds_of(directory, feeds).items():
        taps = {
            f"{matrix} {what}": value
            for matrix, (x, y, _) in places(path, of_steps)
            for what, value in (("input", x), ("output", y))
        }
        # a matrix may read an input of the model: the cross attention of a UNet
        runtime = Runtime(path, taps=[tap for tap in dict.fromkeys(taps.values()) if tap not in given])
        values = {**given, **runtime.run(given)}
        tapped |= {name: values[tap] for name, tap in taps.items()}
    return tapped, values[runtime.outputs[0]]  # of the last graph


def _sample(name: str, array: np.ndarray, count: int) -> np.ndarray:
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    sample: np.ndarray = flat[positions(name, flat.size, count)]
    return sample
