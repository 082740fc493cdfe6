"""The parts of a target's page: options, files of a real conversion, schemes, programs that load it."""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args, get_type_hints

import bridge
from bridge.core.text import fold, grouped, pattern
from bridge.core.values import Program
from bridge.planning.plan import Plan
from bridge.quant.schemes.catalog import kv_names, scheme_names
from bridge.quant.schemes.load import load_scheme, with_kv
from bridge.sources.opening import KINDS
from bridge.targets import load_target
from bridge.targets.onnx.files import files_of
from bridge.targets.tasks import tasks as all_tasks
from docs.generate.matrix import address, cell, kv_cell, table

MODEL = Path(__file__).parent.parent.parent / "examples" / "models" / "tiny-llama"


def options(name: str) -> str:
    """A target's options: keyword, flag, type, default and purpose."""
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
    """The schemes and KV caches that a target takes, with the flags that they need."""
    target = load_target(name)
    cells = [(scheme, cell(load_scheme(scheme), target)) for scheme in scheme_names()]
    rows = [[f"[`{scheme}`](../{address(scheme)})", said, load_scheme(scheme).summary] for scheme, said in cells]
    rows = [row for row in rows if row[1] != "no"]
    caches = [kv for kv in kv_names() if kv_cell(with_kv(load_scheme("fp8"), kv), target) == "yes"]
    cached = f"`kv=`: {', '.join(f'`{kv}`' for kv in caches)}." if caches else "It takes no quantized KV cache."
    if not rows:
        return f"None: unquantized weights only (`quant=None`). {cached}"
    return "\n\n".join([table(["scheme", "taken", "what it is"], rows), cached])


def tasks() -> str:
    """The tasks of target `trt`: classes, inputs and outputs of their graphs."""
    rows = []
    for name, task in all_tasks().items():
        files = ", ".join(f"`{file}`" for file in files_of(name).values())
        gives = "`logits`, `present.*`" if task.parts else ", ".join(f"`{output}`" for output in task.outputs)
        rows.append(
            [
                f"`{name}`",
                ", ".join(f"`{end}`" for end in task.classes),
                ", ".join(f"`{i}`" for i in task.inputs),
                gives,
                files,
            ]
        )
    return table(
        ["task", "classes that end with {: .wide }", "inputs, if the model has them", "outputs", "files"], rows
    )


def programs(kind: str, name: str) -> str:
    """Programs that load what a target writes, or that wrote what a source reads, and the evidence."""
    if kind == "target":
        found: Iterable[Program] = load_target(name).loaded_by
    else:
        assert name in KINDS
        found = importlib.import_module(f"bridge.sources.{name}").WRITTEN_BY
    rows = [[p.name, p.versions, p.proof, ", ".join(f"`{test}`" for test in p.tests)] for p in found]
    return table(["program", "versions", "evidence {: .wide }", "tests"], rows)


def written(name: str, quant: str, *given: str) -> str:
    """Files and tensors of a conversion of the tiny Llama, run now. `given`: options such as `tp=2`."""
    target, scheme = load_target(name), None if quant == "none" else quant
    choice = {key: int(value) for key, value in (pair.split("=") for pair in given)}
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "out"
        bridge.convert(MODEL, name, scheme, out, verify=False, **choice)
        plan = bridge.plan(MODEL, name, scheme, **choice)
        files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    rows = [[f"`{file}`", _purpose(file, target.loads, plan)] for file in files]
    return "\n\n".join([table(["file", "purpose"], rows), _tensors(plan)])


def _purpose(file: str, loads: Iterable[str], plan: Plan) -> str:
    if any(fnmatchcase(file, glob) for glob in loads):
        return "loaded by the runtime"
    if file in plan.side_files:
        return "copied from the source" + (", with a marked section of facts" if file == "README.md" else "")
    return OURS.get(file, "written for readers of this format")


OURS = {
    "bridge.json": "the plan and the gates, for `verify` and `golden`",
    "report.json": "the report",
    "report.html": "the report, as one page without script or network",
    "README.md": "the model card",
    "bridge/calibration.safetensors": "the calibration",
}


def _tensors(plan: Plan) -> str:
    """Every tensor, repeated layers on one line. If ranks hold the same names, only the first rank's."""
    outputs = {output.spec.name: output for output in reversed(plan.outputs)}
    rows = []
    for group in grouped(reversed(outputs.values()), lambda o: (pattern(o.spec.name), o.spec.shape, o.spec.dtype)):
        spec, shape = group[0].spec, "x".join(map(str, group[0].spec.shape))
        rows.append([f"`{fold([o.spec.name for o in group])}`", str(len(group)), shape, spec.dtype, group[0].part])
    return table(["tensor", "n", "shape", "dtype", "part"], rows)
