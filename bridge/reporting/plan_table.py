"""The table that a plan prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType

from bridge.core.addresses import shown
from bridge.core.text import first_of, grouped, shape_text, size
from bridge.planning.plan import Plan
from bridge.reporting.columns import Columns, titled_table
from bridge.reporting.loading import LOADING, loading_rows, loadings
from bridge.reporting.rows import by_reason, name_lines


def plan_table(plan: Plan, every: bool = False) -> RenderableType:
    """The summary, then one row per kind of weight, then the rest of the plan.

    Args:
        every: every output tensor with shape, dtype, bytes and expression, instead of one row per kind of weight.
    """
    head, *totals = plan.lines()
    options = ", ".join(f"{name}={value}" for name, value in plan.options.items())
    notes = [(note,) for note in plan.notes]
    if plan.traced:
        notes.append(("no table lists this architecture: its structure was traced with torch",))
    parts: list[RenderableType] = [head, *totals, f"options  {options}", ""]
    if every:
        columns = ("tensor", "shape", "dtype", "bytes", "made from")
        parts.append(Columns(columns, list(_output_rows(plan)), right=(3,), wrap=False))
    else:
        parts.append(Columns(*plan.table(), right=(1, 4)))
    kept = _kept_rows(plan, every)
    parts += titled_table("unquantized, and why", ("n", "bytes", "why", "tensors"), kept, right=(0, 1))
    parts += titled_table("loaded by", LOADING, loading_rows(loadings(plan)))
    parts += titled_table("tied", ("name", "stored as"), [(a, b) for a, b in sorted(plan.tied.items())])
    parts += titled_table("dropped", ("n", "why", "tensors"), by_reason(plan.dropped, every), right=(0,))
    parts += titled_table("notes", ("note",), notes)
    return Group(*parts, "", f"side files  {', '.join(plan.side_files) or 'none'}")


def uploaded(plan: Plan, out: str) -> dict[str, Any]:
    """What `convert` would upload to `out`: the files that are planned, and bytes; its own texts come on top."""
    return {"out": shown(out), "files": sorted({*plan.files, *plan.side_files}), "bytes": plan.disk}


def upload_line(plan: Plan, out: str) -> str:
    """The same in a sentence."""
    of = uploaded(plan, out)
    how = ", in one commit; a new repository is private" if of["out"].startswith("hf://") else ""
    files = first_of(of["files"], 4)
    return f"{of['out']}: {files}: {size(of['bytes'])}, and config, model card, manifest and report{how}"


def _output_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for o in plan.outputs:
        yield o.spec.name, shape_text(o.spec.shape), o.spec.dtype, f"{o.spec.nbytes:,}", o.expression


def _kept_rows(plan: Plan, every: bool) -> list[tuple[str, ...]]:
    kept = [step for step in plan.steps if step.kept]
    rows: list[tuple[str, ...]] = []
    for group in grouped(kept, lambda step: step.kept):
        names = [output.spec.name for step in group for output in step.outputs]
        rows.append((str(len(group)), size(sum(s.nbytes for s in group)), group[0].kept, name_lines(names, every)))
    return rows
