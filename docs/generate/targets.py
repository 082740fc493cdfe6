"""What a page of a target says: its options, the files of a real conversion, the schemes it takes, what was proved."""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args, get_type_hints

import bridge
from bridge.planning import Plan
from bridge.quant.scheme import kv_names, load_scheme, scheme_names, with_kv
from bridge.show import fold, grouped, pattern
from bridge.sources import KINDS
from bridge.targets import load_target
from bridge.values import Program
from docs.made.matrix import cell, kv_cell, table

MODEL = Path(__file__).parent.parent.parent / "examples" / "models" / "tiny-llama"


def options(name: str) -> str:
    """A target's options: by keyword, as a flag, what they take and what they are for."""
    target = load_target(name)
    hints = get_type_hints(target.Options)
    rows = []
    for entry in dataclasses.fields(target.Options):
        kinds = [kind.__name__ for kind in (hints[entry.name], *get_args(hints[entry.name])) if isinstance(kind, type)]
        dashed = entry.name.replace("_", "-")
        flag = f"`--{dashed}`, `--no-{dashed}`" if "bool" in kinds else f"`--{dashed}`"
        default = "" if entry.default is None else f"`{entry.default}`"
        kinds = [kind for kind in kinds if kind != "NoneType"]
        rows.append([f"`{entry.name}`", flag, ", ".join(kinds), default, str(entry.metadata["help"])])
    return table(["option", "flag", "takes", "default", "what it is for {: .wide }"], rows)


def takes(name: str) -> str:
    """The schemes and KV caches that a target takes, and what it asks for."""
    target = load_target(name)
    cells = [(scheme, cell(load_scheme(scheme), target)) for scheme in scheme_names()]
    rows = [[f"[`{scheme}`](../schemes/{scheme}.md)", said, load_scheme(scheme).summary] for scheme, said in cells]
    rows = [row for row in rows if row[1] != "no"]
    caches = [kv for kv in kv_names() if kv_cell(with_kv(load_scheme("fp8"), kv), target) == "yes"]
    cached = f"`kv=`: {', '.join(f'`{kv}`' for kv in caches)}." if caches else "It takes no quantized KV cache."
    if not rows:
        return f"No scheme: plain weights only (`quant=None`). {cached}"
    return "\n\n".join([table(["scheme", "taken", "what it is"], rows), cached])


def programs(kind: str, name: str) -> str:
    """Who loads what a target writes, or wrote what a source reads, and how that is known."""
    if kind == "target":
        found: Iterable[Program] = load_target(name).loaded_by
    else:
        assert name in KINDS
        found = importlib.import_module(f"bridge.sources.{name}").WRITTEN_BY
    rows = [[p.name, p.versions, p.proof, ", ".join(f"`{test}`" for test in p.tests)] for p in found]
    return table(["program", "versions", "how that is known {: .wide }", "tests"], rows)


def written(name: str, quant: str, *given: str) -> str:
    """The files and the tensors of a conversion of the tiny Llama, made now; `given`: options such as `tp=2`."""
    target, scheme = load_target(name), None if quant == "none" else quant
    choice = {key: int(value) for key, value in (pair.split("=") for pair in given)}
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "out"
        bridge.convert(MODEL, name, scheme, out, verify=False, **choice)
        plan = bridge.plan(MODEL, name, scheme, **choice)
        files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    rows = [[f"`{file}`", _purpose(file, target.loads, plan)] for file in files]
    return "\n\n".join([table(["file", "what for"], rows), _tensors(plan)])


def _purpose(file: str, loads: Iterable[str], plan: Plan) -> str:
    if any(fnmatchcase(file, glob) for glob in loads):
        return "loaded by the runtime"
    if file in plan.side_files:
        return "carried from the source" + (", with a marked section of facts" if file == "README.md" else "")
    return OURS.get(file, "written for readers of this format")


OURS = {
    "bridge.json": "the plan and the gates: what `verify` and `golden` hold it to",
    "report.json": "the report",
    "report.html": "the report, as one page without script or network",
    "README.md": "the model card",
    "bridge/calibration.safetensors": "the statistics that it was calibrated with",
}


def _tensors(plan: Plan) -> str:
    """Every tensor, layers folded to a line; of ranks that hold the same names, those of the first."""
    outputs = {output.spec.name: output for output in reversed(plan.outputs)}
    rows = []
    for group in grouped(reversed(outputs.values()), lambda o: (pattern(o.spec.name), o.spec.shape, o.spec.dtype)):
        spec, shape = group[0].spec, "x".join(map(str, group[0].spec.shape))
        rows.append([f"`{fold([o.spec.name for o in group])}`", str(len(group)), shape, spec.dtype, group[0].part])
    return table(["tensor", "n", "shape", "dtype", "part"], rows)
