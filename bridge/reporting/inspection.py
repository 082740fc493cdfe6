"""Link the inspection of an output from its report."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from bridge.core.errors import warn
from bridge.core.output.temporary import write_whole
from bridge.planning.plan import Plan
from bridge.quant.schemes.catalog import scheme_names
from bridge.reporting.page import render
from bridge.reporting.report import report_from_dict
from bridge.sources.source import Source

PAGE = "inspect.html"


def inspect_command(plan: Plan, source: Source) -> str:
    """The command for an output at `{out}`, in Python if the source is a live model; "" if nothing was quantized.

    Modules of target hf are compared with those of the source; of other targets the source is inspected under the
    scheme, if that has a name.
    """
    if not plan.quantized or (plan.target != "hf" and plan.scheme not in scheme_names()):
        return ""
    if not Path(source.where).exists():
        how = 'against="{out}"' if plan.target == "hf" else f'quant="{plan.scheme}"'
        return f'bridge.inspect(model, {how}, out="{{out}}.inspect")'
    how = "--against {out}" if plan.target == "hf" else f"--quant {plan.scheme}"
    return f"qbridge inspect {shlex.quote(source.where)} {how} --out {{out}}.inspect"


def link_inspection(directory: Path, inspected: Path) -> None:
    """Write the report of an output again, with a link to the page in `inspected`; a warning says if it cannot be."""
    data = directory / "report.json"
    if not data.is_file():
        return
    try:
        found = report_from_dict(json.loads(data.read_text(encoding="utf-8")))
        to = quote(Path(os.path.relpath(inspected / PAGE, directory)).as_posix())
        report = replace(found, inspected=to)
        write_whole(data, f"{report.to_json()}\n".encode())
        write_whole(directory / "report.html", render(report).encode())
    except (OSError, ValueError, TypeError, KeyError) as error:
        warn(f"{directory}: its report does not link {inspected / PAGE}: {error}")
