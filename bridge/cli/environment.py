"""`qbridge show environment`: installed versions, what works with them, what to install."""

from __future__ import annotations

import platform
from typing import Any

from packaging.requirements import Requirement
from rich.console import RenderableType

from bridge.core.ranges import fits, requirements
from bridge.core.version import DISTRIBUTION, __version__, install, installed
from bridge.planning.contract_files import runtimes
from bridge.reporting.columns import Columns

# What each extra is for; `dev` and `docs` are for work on the package itself.
USES = {
    "": "targets hf, trtllm and gguf without calibration, of models with a table",
    "trt": "targets trt and ort, `qbridge run`, models without a table",
    "calibrate": "schemes that need data, sensitivity, prune, distill",
    "golden": "`qbridge golden`",
    "gguf": "K-quants of target gguf, running its files",
    "tensorrt-rtx": "engines without a GPU",
    "diffusers": "models of diffusers",
    "inspect": "the engine of nvdlfw-inspect",
    "s3": "s3://", "gs": "gs://", "az": "az://",
    "ray": "batches on a Ray cluster",
}  # fmt: skip
# Programs with a contract, by the distribution that has their code.
PROGRAMS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm", "genai": "onnxruntime-genai"}


def environment() -> tuple[Any, list[RenderableType]]:
    """The data for --json, and the tables. Nothing that is listed is imported."""
    extras = [_extra(extra, use, needs) for extra, use in USES.items() if (needs := requirements(extra))]
    programs = [
        {"program": runtime.program, "installed": found, "contract": runtime.version}
        for runtime in runtimes()
        if runtime.name in PROGRAMS and (found := installed(PROGRAMS[runtime.name]))
    ]
    data = {"python": platform.python_version(), DISTRIBUTION: __version__, "extras": extras, "programs": programs}
    rows = [(extra["extra"] or "none", extra["use"], _state(extra), extra["fix"]) for extra in extras]
    tables: list[RenderableType] = [f"{DISTRIBUTION} {__version__}, Python {data['python']}", ""]
    tables.append(Columns(("extra", "for", "state", "to install it"), rows))
    if programs:
        tables += ["", Columns(("program", "installed", "contract"), [tuple(program.values()) for program in programs])]
    return data, tables


def _extra(extra: str, use: str, needs: list[Requirement]) -> dict[str, Any]:
    packages: list[dict[str, Any]] = [
        {"name": n.name, "wants": str(n.specifier), "installed": installed(n.name), "fits": fits(n)} for n in needs
    ]
    works = all(package["fits"] for package in packages)
    fix = "" if works else install(extra).replace("[]", "")
    return {"extra": extra, "use": use, "works": works, "packages": packages, "fix": fix}


def _state(extra: dict[str, Any]) -> str:
    wrong = [
        f"{p['name']} {p['installed']} is outside {p['wants']}" if p["installed"] else f"{p['name']} is missing"
        for p in extra["packages"]
        if not p["fits"]
    ]
    return "; ".join(wrong) or "works"
