"""The pages of the Python interface: which names stand on which page. Their docstrings say the rest."""

from __future__ import annotations

from importlib import import_module

import bridge
import bridge.workflows.golden

# Page -> (title, introduction, names). `home` finds the module that defines a name.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "verbs": (
        "Verbs",
        "Functions of `bridge`. The command line has the same verbs.",
        (
            "bridge.convert", "bridge.plan", "bridge.estimate", "bridge.calibrate", "bridge.verify", "bridge.run",
            "bridge.engine", "bridge.check", "bridge.repair",
            "bridge.sensitivity", "bridge.prune", "bridge.pruned", "bridge.search", "bridge.distill", "bridge.chain",
            "bridge.tensors", "bridge.live.digest", "bridge.live.sglang", "bridge.load",
            "bridge.inspect", "bridge.inspecting", "bridge.batch",
            "bridge.golden.record", "bridge.golden.check", "bridge.golden.diff",
        ),
    ),
    "values": (
        "Values",
        "What the verbs take and return: frozen dataclasses that can be printed and have a JSON form.",
        (
            "bridge.Report", "bridge.verification.parity.Parity", "bridge.verification.parity.TensorParity",
            "bridge.verification.parity.OutputParity",
            "bridge.verification.parity.Count", "bridge.reporting.report.Advice", "bridge.Plan",
            "bridge.planning.plan.Step",
            "bridge.planning.plan.Output", "bridge.Estimate", "bridge.planning.estimate.Machine",
            "bridge.Calibration", "bridge.quant.calibration.Provenance", "bridge.Scheme",
            "bridge.quant.schemes.scheme.Rule", "bridge.quant.schemes.grammar.Gate", "bridge.Sensitivity",
            "bridge.api.sensitivity.result.Layer",
            "bridge.api.sensitivity.result.InFormat", "bridge.api.sensitivity.result.Whole",
            "bridge.api.sensitivity.result.Choice", "bridge.BatchReport", "bridge.golden.Golden",
            "bridge.golden.Differences", "bridge.live.Tensors", "bridge.live.TensorMeta", "bridge.live.Bucket",
            "bridge.live.vllm", "bridge.Loaded",
            "bridge.api.generation.Generation", "bridge.sources.pruned.summary.Pruning",
            "bridge.sources.pruned.scores.Scores",
            "bridge.sources.live_models.distillation.Distillation", "bridge.workflows.chain.result.ChainReport",
            "bridge.workflows.chain.result.StepDone",
            "bridge.Searched", "bridge.workflows.prune.searched.Tried", "bridge.Inspection",
            "bridge.workflows.inspect.side_by_side.Compared", "bridge.workflows.inspect.side_by_side.Difference",
            "bridge.workflows.inspect.result.Record", "bridge.workflows.inspect.result.Magnitudes",
            "bridge.workflows.inspect.result.CodeRange", "bridge.workflows.inspect.session.Session",
            "bridge.workflows.doctor.repair.Repaired", "bridge.workflows.doctor.finding.Finding",
            "bridge.targets.trt.record.Engines", "bridge.targets.trt.record.Engine", "bridge.BridgeError",
        ),
    ),
    "protocols": (
        "Protocols",
        "The members that a source or target of yours must have, and the values that it takes and returns.",
        (
            "bridge.sources.source.Source", "bridge.sources.source.SourceKind", "bridge.sources.opening.open_source",
            "bridge.targets.target.Target", "bridge.targets.generation.Generator", "bridge.targets.generation.Settings",
            "bridge.planning.target.Planner",
            "bridge.targets.load_target", "bridge.planning.target.Draft", "bridge.planning.target.Drafted",
            "bridge.streaming.context.ConversionContext", "bridge.streaming.context.WriteResult",
            "bridge.core.values.TensorSpec",
            "bridge.core.values.LazyTensor", "bridge.core.values.Numeric", "bridge.core.values.Format",
            "bridge.core.values.Encoding",
            "bridge.core.values.Slice", "bridge.core.values.Site", "bridge.core.values.InputGroup",
            "bridge.core.values.Structure",
            "bridge.core.values.Program",
        ),
    ),
    "tracker": (
        "Tracker",
        "What runs in a torch model, and where: see [the guide](../guides/tracker.md).",
        (
            "bridge.tracker.ModTracker", "bridge.tracker.NanFinder", "bridge.tracker.NotFinite",
            "bridge.tracker.CostMeter", "bridge.tracker.Cost", "bridge.tracker.raised_in",
        ),
    ),
    "compatibility": (
        "Compatibility",
        "Functions that Tripy's nanoGPT example, NeMo and Transformer Engine call, with their signatures. "
        "The docstrings of their modules list what differs on purpose.",
        (
            "bridge.modelopt_quantize", "bridge.create_forward_loop", "bridge.convert_to_scale", "bridge.get_submodule",
            "bridge.load_weights_from_hf", "bridge.load_quant_weights_from_hf", "bridge.Quantizer",
            "bridge.targets.tripy.load", "bridge.targets.tripy.build",
            "bridge.workflows.inspect.te.dlfw.initialize", "bridge.workflows.inspect.te.dlfw.step",
            "bridge.workflows.inspect.te.dlfw.end_debug", "bridge.workflows.inspect.te.dlfw.log_message",
            "bridge.workflows.inspect.te.dlfw.log_tensor_stats",
            "bridge.workflows.inspect.te.dlfw.set_tensor_reduction_group",
            "bridge.workflows.inspect.te.dlfw.run.TransformerEngine",
        ),
    ),
}  # fmt: skip


def home(name: str) -> str:
    """The dotted name of the module that defines a public name, with the name.

    >>> home("bridge.convert"), home("bridge.golden.check"), home("bridge.core.values.Site")
    ('bridge.api.verbs.convert', 'bridge.workflows.golden.verbs.check', 'bridge.core.values.Site')
    """
    module, _, short = name.rpartition(".")
    homes = {f"bridge.{package}": getattr(bridge, package) for package in ("golden", "live", "tracker")} | {
        "bridge": bridge
    }
    found = homes[module]._HOME.get(short, module) if module in homes else module
    return f"{found}.{short}"


def held(name: str) -> object:
    """The object that a dotted name stands for."""
    module, _, short = home(name).rpartition(".")
    return getattr(import_module(module), short)


def pages() -> dict[str, str]:
    """File name -> page: a directive of mkdocstrings for every name."""
    return {f"reference/{page}.md": _page(*content) for page, content in PAGES.items()}


def _page(title: str, about: str, names: tuple[str, ...]) -> str:
    parts = [f"# {title}", about]
    for name in names:
        parts.append(
            f"::: {home(name)}\n    options:\n      heading: {name}\n      toc_label: {name.removeprefix('bridge.')}"
        )
    return "\n\n".join(parts) + "\n"
