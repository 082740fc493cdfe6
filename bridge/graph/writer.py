"""Writes `model.onnx` and `model.safetensors`: the graph is made while the weights stream."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.budget import cores
from bridge.carrying import carrier_of
from bridge.container import layout
from bridge.conversion import Conversion, Written
from bridge.errors import ExportError, fold_layers
from bridge.planning import Plan, Step
from bridge.remote.threads import readers
from bridge.targets import load_target

if TYPE_CHECKING:
    import onnx_ir as ir

    from bridge.graph.export import Graph
    from bridge.stream import Streamed

WEIGHTS = "model.safetensors"
MODEL = "model.onnx"


def write_onnx(conversion: Conversion, directory: Path) -> Written:
    """Write both files into `directory`; whichever of graph and stream fails first stops the other."""
    from bridge.stream import run

    stop = threading.Event()
    spare = replace(conversion, workers=max(1, cores() - 1))  # one core makes the graph meanwhile
    with readers(1, conversion.source, name="weights") as pool:
        weights: Future[Streamed] = pool.submit(run, spare, directory, stop)
        try:
            graph, unused = make_graph(conversion, directory)
            streamed = weights.result()
        except BaseException:
            stop.set()
            raise
    save(graph.model, directory / MODEL)
    notes = ((f"layers were exported one by one: {graph.note}",) if graph.note else ()) + streamed.notes()
    skipped = {name: f"not read by the {graph.task} graph; kept in {WEIGHTS}" for name in unused}
    return Written(streamed.policies, skipped, notes)


def make_graph(conversion: Conversion, directory: Path) -> tuple[Graph, list[str]]:
    """Export the float graph, put Q/DQ in, point weights at their places; also the planned tensors it does not read."""
    from bridge.graph.export import export_graph
    from bridge.graph.qdq import Inserter, Store, attach
    from bridge.graph.sites import find_kv, find_sites

    plan = conversion.plan
    options = plan.options
    tell = conversion.progress
    graph = export_graph(
        dict(conversion.source.config),
        task=options["task"],
        dtype=options["dtype"],
        opset=options["opset"],
        cache=options["cache"],
        stamp=options["stamp"],
        progress=lambda text: tell(0, 0, text),
    )
    names = _checkpoint_names(graph, conversion)
    specs = {output.spec.name: output for output in plan.outputs}
    target = load_target(plan.target)
    _, offsets, _ = layout((output.spec for output in plan.outputs), target.metadata, target.align)
    store = Store(directory, WEIGHTS, offsets, specs)
    inserter = Inserter(graph.model, store, _constants(conversion))
    initializers = {name: initializer for initializer, name in names.items()}
    wanted = {_key(step, initializers, graph): step for step in plan.quantized if _reads(step, initializers)}
    uses = find_sites(graph, wanted)
    kv = find_kv(graph)
    # Taken out first: codes get the name of the float weight that they replace.
    floats = {name: graph.model.graph.initializers.pop(initializer) for initializer, name in names.items()}
    for key, step in wanted.items():
        inserter.quantize(step, uses[key])
    _quantize_kv(inserter, conversion, kv)
    _sweep(graph.model)
    attach(graph.model, floats, store)
    read = set(graph.model.graph.initializers)
    return graph, sorted(
        step.outputs[0].spec.name for step in plan.steps if not step.attention and step.outputs[0].spec.name not in read
    )


def save(model: ir.Model, path: Path) -> None:
    """Write the graph without metadata: they hold the exporter's notes, and the same graph must give the same bytes."""
    import onnx_ir as ir
    from onnx_ir.passes.common import TopologicalSortPass

    from bridge.graph.export import strip

    TopologicalSortPass()(model)
    strip(model)
    path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def _reads(step: Step, initializers: Mapping[str, str]) -> bool:
    return step.site is not None and (step.source in initializers)


def _key(step: Step, initializers: Mapping[str, str], graph: Graph) -> str:
    """What `find_sites` is asked for: the weight's initializer, or the module of a head tied to the embedding."""
    assert step.site
    if step.site.weight != step.source:
        return step.site.module
    return initializers[step.source]


def _quantize_kv(inserter: Any, conversion: Conversion, kv: Mapping[int, Any]) -> None:
    steps = [step for step in conversion.plan.steps if step.attention]
    if not steps:
        return
    assert conversion.scheme and conversion.scheme.kv
    if len(steps) != len(kv):
        raise ExportError(f"the plan quantizes K and V of {len(steps)} attention modules, the graph has {len(kv)}")
    for step, values in zip(steps, kv.values(), strict=True):
        inserter.quantize_kv(step, conversion.scheme.kv, values)


def _constants(conversion: Conversion) -> dict[str, bytes]:
    """Calibrated or carried tensors by name, as bytes that are equal when the tensors are: those share their nodes."""
    calibration, carrier = conversion.calibration, carrier_of(conversion)
    found: dict[str, bytes] = {}
    for step in conversion.plan.quantized:
        carried = carrier.constants(step) if carrier else {}
        for output in step.outputs:
            assert step.site and step.format
            if output.part in carried:
                found[output.spec.name] = carried[output.part].tobytes()
            elif output.part == "input_scale" and calibration:
                found[output.spec.name] = calibration.input_amax[step.site.module].tobytes()
            elif output.part == "pre_quant_scale" and calibration:
                from bridge.quant.smoothing import pre_scale

                found[output.spec.name] = pre_scale(calibration, step.site.module, step.format).tobytes()
    return found


def _sweep(model: ir.Model) -> None:
    """Remove what nothing reads any more: the transposes and float weights that the codes replaced."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    RemoveUnusedNodesPass()(model)


def _checkpoint_names(graph: Graph, conversion: Conversion) -> dict[str, str]:
    """Initializer -> checkpoint tensor; the model's own conversion is asked only where live names are other names."""
    plan, source = conversion.plan, conversion.source
    known = {*plan.sources, *plan.tied}
    if all(live in known for live in graph.weights.values()):
        return {initializer: plan.tied.get(live, live) for initializer, live in graph.weights.items()}
    from bridge.sources.live import live_names, live_parts

    parts = live_parts(live_names(_weightless(source.config, graph.task), plan.sources))
    found: dict[str, str] = {}
    missing: list[str] = []
    for initializer, live in graph.weights.items():
        name = live if live in known else _part_name(live, parts)
        if name is None:
            missing.append(live)
        else:
            found[initializer] = plan.tied.get(name, name)
    if missing:
        raise ExportError(_unmatched(missing, graph.task, plan))
    return found


def _weightless(config: Mapping[str, Any], task: str) -> Any:
    import torch

    from bridge.graph.skeleton import build_meta
    from bridge.graph.tasks import model_class, resolve_config

    resolved = resolve_config(dict(config))
    return build_meta(resolved, model_class(resolved, task), torch.float32)


def _unmatched(missing: Iterable[str], task: str, plan: Plan) -> str:
    names = ", ".join(fold_layers(sorted(missing)))
    return (
        f"the {task} graph of {plan.architecture} reads weights that the checkpoint lacks: {names}\n"
        "  hint   another task, or a checkpoint that was saved for this one"
    )


def _part_name(live: str, parts: Mapping[str, Mapping[Any, str]]) -> str | None:
    """Find the checkpoint tensor of `live`: a whole tensor, an expert `stack[3]`, or half of one, `stack[3, gate]`."""
    stack, _, index = live.partition("[")
    candidates = parts.get(stack, {})
    if not index:
        return next((name for ref, name in candidates.items() if not ref.index), None)
    expert, _, half = index.rstrip("]").partition(", ")
    of_expert = sorted(
        ((ref.rows or (0, 0), name) for ref, name in candidates.items() if ref.expert == int(expert)),
        key=lambda item: item[0],
    )
    if half:
        return of_expert[{"gate": 0, "up": 1}[half]][1] if len(of_expert) == 2 else None
    return of_expert[0][1] if len(of_expert) == 1 else None
