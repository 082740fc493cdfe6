"""Time and memory of modules."""

from __future__ import annotations

from bridge.core.text import grouped, pattern, size
from bridge.reporting.page import Section, Table
from bridge.workflows.inspect.result import COSTS, Inspection, batches_of, cost_cells

MOST = 20
MEASURED = (
    "Milliseconds and bytes of one batch, on average, in a second run without statistics. Own: without the modules "
    "inside. Hooks add some 20 us a module. inspect.json has every module, added up over all batches."
)


def costs(inspection: Inspection) -> Section:
    """The costliest modules, and the own time by kind of module."""
    found = inspection.costs
    if not found:
        return Section("costs", "Time and memory")
    rows = [cost_cells(cost, found) for cost in inspection.costliest(MOST)]
    total = sum(cost.own for cost in found) or 1.0
    kinds = [
        (kind, len(group), sum(cost.own for cost in group) / total)
        for group in grouped(found, lambda cost: _kind(cost.module))
        for kind in [_kind(group[0].module)]
    ]
    kinds.sort(key=lambda row: (-row[2], row[0]))
    by_kind = [(kind, f"{count:,}", f"{share:.1%}") for kind, count, share in kinds[:MOST]]
    kept = max(cost.kept for cost in found) // batches_of(found)
    words = [MEASURED, *([f"All modules together keep {size(kept)} for backward."] if kept else [])]
    return Section(
        "costs",
        "Time and memory",
        words,
        tables=[
            Table("The costliest modules", COSTS, rows, range(1, 6)),
            Table("Own time by kind", ("kind", "modules", "share of own time"), by_kind, (1, 2)),
        ],
    )


def _kind(module: str) -> str:
    """A module's name without its layer, also that of a whole layer."""
    return pattern(f"{module}.").removesuffix(".")
