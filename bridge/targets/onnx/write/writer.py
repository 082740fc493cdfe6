"""Write the graphs, and `model.safetensors` that all read, together."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import ExportError
from bridge.core.formats.safetensors import layout
from bridge.core.machine import cores
from bridge.core.remote.readers import readers
from bridge.core.text import fold_layers
from bridge.core.values import main_dtype
from bridge.planning.plan import Plan, Step
from bridge.quant.smoothing import pre_scale
from bridge.sources.config_json import read_json
from bridge.streaming.context import ConversionContext, WriteResult
from bridge.streaming.passthrough import copied_constants
from bridge.streaming.scales import input_amax
from bridge.targets.config_json import restated, with_dtype
from bridge.targets.onnx.files import WEIGHTS, files_of
from bridge.targets.onnx.formats import IR_VERSIONS, OLDEST_OPSET

if TYPE_CHECKING:
    import onnx_ir as ir

    from bridge.streaming.run import Summary
    from bridge.targets.onnx.export.float_graph import Graph
    from bridge.targets.onnx.export.request import GraphRequest

CONFIG = "config.json"


@dataclass(frozen=True)
class GraphOptions:
    """What is exported.

    `opset`: of the file. `attention_op`: attention is ONNX's operator, not MatMul, Softmax and MatMul.
    `rewrite` edits the float graph in place before it is quantized. `join` joins products of matrices that the plan
    joins, given initializer -> checkpoint tensor, and returns these names with the joined tensors in place of theirs.
    """

    task: str
    dtype: str
    opset: int
    cache: bool
    stamp: bool
    image: tuple[int, int] | None = None
    pooling: str = ""
    attention_op: bool = False
    rewrite: Callable[[Graph], None] | None = None
    join: Callable[[ir.Model, Plan, Mapping[str, str]], dict[str, str]] | None = None


def write_onnx(
    context: ConversionContext, directory: Path, options: GraphOptions
) -> tuple[WriteResult, dict[str, Any]]:
    """Write all files into `directory` and return also `Graph.text`; if graph or stream fails, the other stops."""
    from bridge.streaming.run import run
    from bridge.targets.onnx.export.light_import import import_onnx_ir

    import_onnx_ir()
    from bridge.targets.onnx.export.cached import is_cached

    stop, spare, files = threading.Event(), context, files_of(options.task)
    if not all(is_cached(_request(context, options, part)) for part in files):
        spare = replace(context, workers=max(1, cores() - 1))  # one core makes the graph
    with readers(1, context.source, name="weights") as pool:
        weights: Future[Summary] = pool.submit(run, spare, directory, stop)
        try:
            made = {file: make_graph(context, directory, options, part) for part, file in files.items()}
            summary = weights.result()
        except BaseException:
            stop.set()
            raise
    for file, one in made.items():
        save(one.graph.model, directory / file)
    notes = dict.fromkeys(
        f"all layers were exported, none stamped: {o.graph.note}" for o in made.values() if o.graph.note
    )
    _check_placed(list(made.values()))
    _write_config(context, directory, options.dtype)
    unused = set.intersection(*(one.unused for one in made.values()))
    skipped = {name: f"not read by the {options.task} graph; kept in {WEIGHTS}" for name in sorted(unused)}
    text = next(iter(made.values())).graph.text
    half = options.dtype != "float32"  # else they are half in the source, too, and the plan says so
    rounded = sorted({name for one in made.values() for name in one.widened if half})
    told = [f"computed in float32, stored in half precision: {', '.join(fold_layers(rounded))}"] if rounded else []
    return WriteResult(summary.policies, skipped, (*notes, *told, *summary.notes())), text


def _write_config(context: ConversionContext, directory: Path, dtype: str) -> None:
    """Write config.json if the source's states another dtype than the graphs have; it is copied otherwise."""
    if CONFIG not in context.plan.side_files:
        return
    content = context.source.side_files[CONFIG]
    config = read_json(content, CONFIG)
    changed = dtype != main_dtype(context.plan.sources.values())
    if (stated := restated(config, dtype) if changed else with_dtype(config, dtype)) != config:
        (directory / CONFIG).write_text(json.dumps(stated, indent=2) + "\n")


def _check_placed(made: Sequence[MadeGraph]) -> None:
    """ExportError if a quantized matrix that some of several graphs read is multiplied in none.

    One that none reads, as the pooler of an image encoder before a decoder, is told as skipped.
    """
    if len(made) == 1:
        return  # `find_sites` asks for all of them
    if lost := set().union(*(one.read for one in made)).difference(*(one.placed for one in made)):
        raise ExportError(f"weight of {', '.join(fold_layers(sorted(lost)))} is read by no MatMul, Gemm or Conv")


def _request(context: ConversionContext, options: GraphOptions, part: str) -> GraphRequest:
    from bridge.targets.onnx.export.request import GraphRequest

    plan = context.plan
    opset = options.opset if options.attention_op else OLDEST_OPSET
    config = with_dtype(context.source.config, options.dtype)  # of parts, too: their classes read their own
    return GraphRequest(
        config, options.task, options.dtype, opset, options.cache, options.stamp,
        tuple(sorted(plan.sources)), dict(plan.tied), part, options.image,
        options.pooling, any(part.expert is not None for step in plan.steps for part in step.inputs),
    )  # fmt: skip


@dataclass(frozen=True)
class MadeGraph:
    """A finished graph; quantized matrices that it reads and that are in it, planned tensors that it does not read.

    `widened`: tensors that are stored in half precision and cast to float32.
    """

    graph: Graph
    read: set[str]
    placed: set[str]
    unused: set[str]
    widened: list[str]


def make_graph(context: ConversionContext, directory: Path, options: GraphOptions, part: str = "") -> MadeGraph:
    """Export the float graph, insert Q/DQ, attach the weights. `part`: of several graphs."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    from bridge.targets.onnx.export.cached import float_graph
    from bridge.targets.onnx.write.qdq import Inserter, WeightsFile, attach, widen_products
    from bridge.targets.onnx.write.sites import find_kv, find_sites

    plan = context.plan
    graph, names = float_graph(_request(context, options, part), lambda text: context.progress(0, 0, text))
    # Newer opsets give the operators of 21 more types, and no other meaning.
    graph.model.graph.opset_imports[""], graph.model.ir_version = options.opset, IR_VERSIONS[options.opset]
    if options.dtype != "bfloat16":
        widen_products(graph.model.graph)
    if options.rewrite:
        options.rewrite(graph)
    if options.join:
        names = options.join(graph.model, plan, names)
    specs = {output.spec.name: output for output in plan.outputs}
    _, offsets, _ = layout((output.spec for output in plan.outputs), context.files.metadata, context.files.align)
    weights_file = WeightsFile(directory, WEIGHTS, offsets, specs)
    inserter = Inserter(graph.model, weights_file, _constants(context))
    initializers = {name: initializer for initializer, name in names.items()}
    quantized = [step for step in plan.quantized if step.site and _weight(step) in initializers]
    quantized = [step for step in quantized if step.coding.packed != "int32"]  # `join` has placed these
    steps = {_key(step, initializers): step for step in quantized}
    uses = find_sites(graph, steps, some=bool(part))
    kv = find_kv(graph)
    # Removed first: codes get the name of the float weight that they replace.
    floats = {name: graph.model.graph.initializers.pop(initializer) for initializer, name in names.items()}
    for key in uses:
        inserter.quantize(steps[key], uses[key])
    if part in ("", "decoder"):  # towers and embeddings keep none
        _quantize_kv(inserter, context, kv)
    RemoveUnusedNodesPass()(graph.model)  # transposes and float weights that codes replaced
    widened = attach(graph.model, floats, weights_file)
    stored = {step.outputs[0].spec.name for step in plan.steps if not step.attention}
    placed = {steps[key].matrix for key in uses}
    return MadeGraph(
        graph, {step.matrix for step in quantized}, placed, stored - set(graph.model.graph.initializers), widened
    )


def save(model: ir.Model, path: Path) -> None:
    """Write the graph without the metadata for `find_sites` and `find_kv`; the same graph gives the same bytes."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, TopologicalSortPass

    TopologicalSortPass()(model)
    ClearMetadataAndDocStringPass()(model)
    path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def _key(step: Step, initializers: Mapping[str, str]) -> str:
    """The key for `find_sites`: the weight's initializer, or the module of a head tied to the embedding."""
    assert step.site
    tied = step.inputs[0].expert is None and step.site.weight != step.source
    return step.site.module if tied else initializers[_weight(step)]


def _weight(step: Step) -> str:
    """The tensor that the float graph reads: the checkpoint's, one that several are joined to, or one of a stack."""
    whole = len(step.inputs) == 1 and step.inputs[0].expert is None
    return step.source if whole else step.outputs[0].spec.name


def _quantize_kv(inserter: Any, context: ConversionContext, kv: Mapping[int, Any]) -> None:
    steps = [step for step in context.plan.steps if step.attention]
    if not steps:
        return
    assert context.scheme and context.scheme.kv
    if len(steps) != len(kv):
        raise ExportError(
            f"the plan quantizes K and V of {len(steps)} attention modules, but the graph has {len(kv)}; leave out kv"
        )
    for step, values in zip(steps, kv.values(), strict=True):
        inserter.quantize_kv(step, context.scheme.kv, values)


def _constants(context: ConversionContext) -> dict[str, bytes]:
    """Bytes of calibrated or copied tensors by name; tensors with equal bytes share their nodes."""
    calibration, quantized = context.calibration, context.source.quantized
    constants: dict[str, bytes] = {}
    for step in context.plan.quantized:
        copied = copied_constants(step, quantized.tensors) if quantized and context.plan.copies(step) else {}
        for output in step.outputs:
            assert step.site and step.format
            name, module = output.spec.name, step.site.module
            if output.part in copied:
                constants[name] = copied[output.part].tobytes()
            elif output.part == "input_scale":
                constants[name] = input_amax(step, calibration).tobytes()
            elif output.part == "pre_quant_scale" and calibration:
                constants[name] = pre_scale(calibration, module, step.format).tobytes()
    return constants
