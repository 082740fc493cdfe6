"""The output error that each quantized matrix of a written graph adds.

The error of a layer is |x Ŵ - x W| / |x W| with its input x in the written model, before its own quantizer: the error
that it adds, without inherited error. Convolutions are left out (their products are not one matrix).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.dtypes import to_float32
from bridge.core.values import Slice
from bridge.planning.plan import Plan, Step
from bridge.sources.configs.diffusion import PLACES

if TYPE_CHECKING:
    from bridge.sources.source import Source

POSITIONS = 128  # rows of x per layer: enough to rank layers, small enough to hold every layer's output
MASK = "attention_mask"
GROUP = 64  # layers tapped in one run, so that their inputs and outputs are not all held at once


def layer_errors(
    directory: Path, plan: Plan, source: Source, batch: Mapping[str, np.ndarray], runtime: Any
) -> tuple[tuple[str, float], ...]:
    """Return (matrix, error) for every quantized matrix of the graph, the worst first. `runtime`: the written model."""
    from bridge.targets.onnx.files import MODEL
    from bridge.targets.onnx.run.encoder_decoder import EncoderDecoder
    from bridge.targets.onnx.run.multimodal import MultiModal

    steps = {step.matrix: step for step in plan.quantized if step.site and step.site.layout != "conv"}
    each: Mapping[str, Mapping[str, np.ndarray]]
    if isinstance(runtime, MultiModal):
        each = runtime.first_row(batch, POSITIONS)
    else:
        text = "input_ids" in batch
        first = {n: array if n in PLACES else _first(array, text or n != MASK) for n, array in batch.items()}
        each = runtime.feeds(first) if isinstance(runtime, EncoderDecoder) else {MODEL: first}
    errors: dict[str, float] = {}
    for file, feeds in each.items():
        errors |= _of_graph(directory / file, steps, source, plan, feeds)
    return tuple(sorted(errors.items(), key=lambda item: -item[1]))


def _of_graph(
    path: Path, steps: Mapping[str, Step], source: Source, plan: Plan, feeds: Mapping[str, np.ndarray]
) -> dict[str, float]:
    from bridge.targets.onnx.run.runtime import Runtime

    at_work = dict(places(path, steps.values()))
    errors: dict[str, float] = {}
    modules = list(at_work)
    for first in range(0, len(modules), GROUP):
        group = modules[first : first + GROUP]
        # a matrix may read an input of the model: the cross attention of a UNet
        taps = dict.fromkeys(name for module in group for name in at_work[module][:2] if name not in feeds)
        values = {**feeds, **Runtime(path, taps=list(taps), outputs=False).run(feeds)}
        for module in group:
            x, y, bias = at_work[module]
            errors[module] = _layer_error(steps[module], source, plan, values[x], values[y], bias)
    return errors


def _first(array: np.ndarray, tokens: bool) -> np.ndarray:
    """The first row of an input, of tokens the first positions; the mask of a sound is as long as the sound."""
    return array[:1, :POSITIONS] if tokens and array.ndim == 2 and array.dtype.kind in "iub" else array[:1]


def _layer_error(step: Step, source: Source, plan: Plan, x: Any, y: Any, bias: Any) -> float:
    assert step.site
    weight = np.concatenate([to_float32(_stored(source, p), plan.sources[p.source].dtype) for p in step.inputs])
    weight = weight.T if step.site.layout == "out_in" else weight
    product = x.reshape(-1, x.shape[-1]).astype(np.float32) @ weight
    output = y.reshape(-1, y.shape[-1]).astype(np.float32)
    output = output if bias is None else output - bias
    norm = float(np.linalg.norm(product))
    return float(np.linalg.norm(output - product)) / norm if norm else 0.0


def _stored(source: Source, part: Slice) -> np.ndarray:
    """A matrix as it is stored: the whole tensor, or that of one expert."""
    if part.expert is None:
        return source.read(part.source)
    matrix: np.ndarray = source.read_rows(part.source, part.expert, part.expert + 1)[0]
    return matrix


def places(path: Path, steps: Iterable[Step]) -> Iterator[tuple[str, tuple[str, str, np.ndarray | None]]]:
    """Matrix -> names of its float input and its output, and the bias that a Gemm has added to the output."""
    import onnx_ir as ir

    model = ir.load(path)
    for step in steps:
        value = model.graph.initializers.get(step.outputs[0].spec.name)
        while value is not None:
            users = [node for node, at in value.uses() if at == (0 if node.op_type not in ("MatMul", "Gemm") else 1)]
            if len(users) != 1:
                break
            node = users[0]
            if node.op_type in ("MatMul", "Gemm"):
                bias = node.inputs[2].const_value if len(node.inputs) > 2 and node.inputs[2] is not None else None
                bias_array = None if bias is None else bias.numpy().astype(np.float32)
                yield step.matrix, (str(_before_quantizer(node.inputs[0]).name), str(node.outputs[0].name), bias_array)
                break
            value = node.outputs[0]


def _before_quantizer(value: Any) -> Any:
    """Follow a matrix's input back over DequantizeLinear, QuantizeLinear and the pre-scale to the float value."""
    producer = value.producer()
    while producer is not None and (
        producer.op_type in ("DequantizeLinear", "QuantizeLinear")
        or (producer.op_type == "Mul" and (producer.name or "").endswith("/pre_quant_scale"))
    ):
        value = producer.inputs[0]
        producer = value.producer()
    return value
