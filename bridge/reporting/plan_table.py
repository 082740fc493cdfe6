"""The table that a plan prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType

from bridge.core.addresses import shown
from bridge.core.text import first_of, fold, grouped, number, pattern, shape_text, size
from bridge.planning.plan import Plan, Step
from bridge.reporting.columns import Columns, Labelled, titled_table
from bridge.reporting.loading import LOADING, loading_line, loading_rows, loadings
from bridge.reporting.rows import by_reason, name_lines

MOST_LINES = 40  # of a plan without `every`, where the terminal is wide enough for a row a line
MOST_NAMES = 4  # of a line
UNLIKE = ": not a matrix multiplication"  # behind the role of a tensor, which the table of weights has


def plan_table(plan: Plan, every: bool = False) -> RenderableType:
    """The summary, then one row per kind of weight, then a line for each other part of the plan.

    Args:
        every: every output tensor with shape, dtype, bytes and expression, and tables of all else.
    """
    options = ", ".join(f"{name}={value}" for name, value in plan.options.items())
    notes = [*plan.notes]
    if plan.traced:
        notes.append("no table lists this architecture: its structure was traced with torch")
    head = [*plan.lines(), f"options  {options}", ""]
    files = ", ".join(plan.side_files) or "none"
    if every:
        return Group(*head, *_everything(plan, notes), "", f"side files  {files}")
    rest = Labelled([*_brief(plan), *(("note", note) for note in notes), ("files", files)])
    kinds = plan.kinds()
    columns, rows = plan.table(kinds)
    room = MOST_LINES - len(head) - len(rest.rows) - 3  # the header, a blank line, and how long it takes
    return Group(*head, Columns(columns, _largest(kinds, rows, max(room, 8)), right=(1, 4)), "", rest)


def _largest(kinds: Sequence[Sequence[Step]], rows: Sequence[tuple[str, ...]], room: int) -> list[tuple[str, ...]]:
    """The rows that there is room for, those of most bytes, in their order; the last one counts the others."""
    if len(rows) <= room:
        return list(rows)
    sizes = [sum(step.nbytes for step in group) for group in kinds]
    kept = sorted(sorted(range(len(rows)), key=lambda at: -sizes[at])[: room - 1])
    left = sum(sizes) - sum(sizes[at] for at in kept)
    return [*(rows[at] for at in kept), (f"{len(rows) - len(kept)} more kinds: --all", "", "", "", size(left))]


def _brief(plan: Plan) -> Iterator[tuple[str, str]]:
    """A line for what stays unquantized for a reason, for what loads it, and for what is tied or dropped."""
    kept = [step for step in plan.steps if step.kept]
    for group in grouped(kept, lambda step: UNLIKE if step.kept.endswith(UNLIKE) else step.kept):
        names = [step.outputs[0].spec.name for step in group]
        why, nbytes = group[0].kept, size(sum(step.nbytes for step in group))
        if why.endswith(UNLIKE):
            yield "kept", f"{number(len(group), 'tensor')}, {nbytes}: {UNLIKE.removeprefix(': ')}"
        else:
            yield "kept", f"{number(len(group), 'tensor')}, {nbytes}: {why} ({_some(names)})"
    entries = loadings(plan)
    asked = entries[:1] if plan.program else entries
    if loads := loading_line(asked):
        yield "loads in", loads
    if plan.tied:
        yield "tied", first_of([f"{a} to {b}" for a, b in sorted(plan.tied.items())], 2)
    for dropped in grouped(list(plan.dropped.items()), lambda item: item[1]):
        yield "dropped", f"{len(dropped)}: {dropped[0][1]} ({_some([name for name, _ in dropped])})"


def _some(names: list[str]) -> str:
    """A few names, repeated layers folded."""
    return first_of([fold(list(group)) for group in grouped(names, pattern)], MOST_NAMES)


def _everything(plan: Plan, notes: Sequence[str]) -> Iterator[RenderableType]:
    columns = ("tensor", "shape", "dtype", "bytes", "made from")
    yield Columns(columns, list(_output_rows(plan)), right=(3,), wrap=False)
    yield from titled_table("unquantized, and why", ("n", "bytes", "why", "tensors"), _kept_rows(plan), right=(0, 1))
    yield from titled_table("loaded by", LOADING, loading_rows(loadings(plan)))
    yield from titled_table("tied", ("name", "stored as"), [(a, b) for a, b in sorted(plan.tied.items())])
    yield from titled_table("dropped", ("n", "why", "tensors"), by_reason(plan.dropped, True), right=(0,))
    yield from titled_table("notes", ("note",), [(note,) for note in notes])


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


def _kept_rows(plan: Plan) -> list[tuple[str, ...]]:
    kept = [step for step in plan.steps if step.kept]
    rows: list[tuple[str, ...]] = []
    for group in grouped(kept, lambda step: step.kept):
        names = [output.spec.name for step in group for output in step.outputs]
        rows.append((str(len(group)), size(sum(s.nbytes for s in group)), group[0].kept, name_lines(names, True)))
    return rows
