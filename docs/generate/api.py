"""The reference of the Python interface: which names stand on which page; their docstrings say the rest."""

from __future__ import annotations

from importlib import import_module

import bridge
import bridge.golden

# Page -> (title, introduction, names). A name of `bridge` or `bridge.golden` is looked up where it is at home.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "verbs": (
        "Verbs",
        "Functions of `bridge`; the command line has the same words.",
        (
            "bridge.convert", "bridge.plan", "bridge.calibrate", "bridge.verify", "bridge.check", "bridge.sensitivity",
            "bridge.batch",
            "bridge.golden.record", "bridge.golden.check", "bridge.golden.diff",
        ),
    ),
    "values": (
        "Values",
        "What the verbs return and take: frozen dataclasses, which print themselves and have a JSON form.",
        (
            "bridge.Report", "bridge.report.Parity", "bridge.report.TensorParity", "bridge.report.OutputParity",
            "bridge.report.Count", "bridge.report.Advice", "bridge.Plan", "bridge.planning.Step",
            "bridge.planning.Output", "bridge.Calibration", "bridge.quant.calibration.Provenance", "bridge.Scheme",
            "bridge.quant.scheme.Rule", "bridge.quant.grammar.Gate", "bridge.Sensitivity", "bridge.costs.result.Layer",
            "bridge.costs.result.Choice", "bridge.BatchReport", "bridge.golden.Golden", "bridge.golden.Moved",
            "bridge.BridgeError",
        ),
    ),
    "protocols": (
        "Protocols",
        "What a source and a target of yours must have, and the values that pass between them and the core.",
        (
            "bridge.sources.Source", "bridge.sources.SourceKind", "bridge.sources.open_source", "bridge.targets.Target",
            "bridge.targets.load_target", "bridge.planning.Draft", "bridge.planning.Drafted",
            "bridge.conversion.Conversion", "bridge.conversion.Written", "bridge.values.TensorSpec",
            "bridge.values.LazyTensor", "bridge.values.Numeric", "bridge.values.Format", "bridge.values.Coding",
            "bridge.values.Slice", "bridge.values.Site", "bridge.values.InputGroup", "bridge.values.Structure",
            "bridge.values.Program",
        ),
    ),
    "doors": (
        "Doors",
        "Names that scripts of Tripy's nanoGPT example and of NeMo call already, with their signatures.",
        (
            "bridge.modelopt_quantize", "bridge.create_forward_loop", "bridge.convert_to_scale", "bridge.get_submodule",
            "bridge.load_weights_from_hf", "bridge.load_quant_weights_from_hf", "bridge.Quantizer",
            "bridge.targets.tripy.load", "bridge.targets.tripy.build",
        ),
    ),
}  # fmt: skip


def home(name: str) -> str:
    """The dotted name under which the source of a public name stands.

    >>> home("bridge.convert"), home("bridge.golden.check"), home("bridge.values.Site")
    ('bridge.api.convert', 'bridge.golden.verbs.check', 'bridge.values.Site')
    """
    module, _, short = name.rpartition(".")
    homes = {"bridge": bridge._HOME, "bridge.golden": bridge.golden._HOME}.get(module, {})
    return f"{homes.get(short, module)}.{short}"


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
