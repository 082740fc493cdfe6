"""The page of an inspection: its head, the comparison, tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bridge.core.text import grouped, number, pattern, size
from bridge.reporting.page import Page, Section, Table, Tile, html_of
from bridge.reporting.plots import HEIGHT, LEFT, MAX_MARKS, WIDTH, Axis, Mark, Plot, Word
from bridge.workflows.inspect.page.grids import (
    NOISE,
    Cell,
    grid,
    grids,
    losses_by_scheme,
    scheme_of,
    statistics_of,
    worst_of,
)
from bridge.workflows.inspect.page.magnitudes import magnitudes
from bridge.workflows.inspect.page.over_steps import over_steps
from bridge.workflows.inspect.result import (
    COLUMNS,
    COSTS,
    Inspection,
    Record,
    batches_of,
    cost_cells,
    decibels_text,
    is_bad,
)
from bridge.workflows.inspect.side_by_side import Compared

END = "Written by qbridge; inspect.json and statistics.csv have the same figures."
SHOWN = 20
OUTLIERS = 20.0  # amax over the 99.9th percentile: with 7 bits, most values then fall on few codes
WORST_COLUMNS = ("layer", "role", "tensor", "scheme", "dB", "why")
MOST = 20
MEASURED = (
    "Milliseconds and bytes of one batch, on average, in a second run without statistics. Own: without the modules "
    "inside. Hooks add some 20 us a module. inspect.json has every module, added up over all batches."
)
WORST_MATRICES = 20
COMPARED = "Beside the source"
COMPARED_HOW = "Alone: with the input that the source has there. Accumulated: with all errors of the modules before."
COMPARED_WHY = "A matrix that is bad alone makes an error; one that is bad accumulated only passes it on."


def render(inspection: Inspection) -> str:
    """The page as HTML; equal inspections give equal pages."""
    return html_of(page_of(inspection))


def page_of(inspection: Inspection) -> Page:
    """The page of an inspection; empty sections are left out."""
    sections = [
        _first_bad(inspection), compared(inspection), worst(inspection), grids(inspection), magnitudes(inspection),
        over_steps(inspection), costs(inspection), _about(inspection),
    ]  # fmt: skip
    about = inspection.about
    layers = len({record.layer for record in inspection.records})
    what = f"{number(len(inspection.records), 'value')} of {number(layers, 'layer')}"
    scheme = f", scheme {about['scheme']}" if about.get("scheme") else ""
    return Page(
        title=about.get("model", "inspection"),
        line=f"{what if layers else 'Beside ' + about.get('against', 'nothing')}{scheme}.",
        passed=inspection.finite,
        verdict="" if inspection.finite else "not all are finite",
        tiles=list(_tiles(inspection)),
        sections=[s for s in sections if s.plots or s.tables or s.folded or s.words],
        judged="Values",
        end=END,
    )


def _tiles(inspection: Inspection) -> Iterator[Tile]:
    least: dict[str, tuple[float, str]] = {}
    for name, records in losses_by_scheme(inspection).items():
        scheme, _, tensor = name.rpartition(" ")
        values = [record.value for record in records if record.value is not None]
        if values:
            least[scheme] = min(least.get(scheme, (min(values), tensor)), (min(values), tensor))
    for scheme, (value, tensor) in least.items():
        yield Tile(f"Worst of {scheme or 'the scheme'}", f"{value:.1f} dB", tensor)
    for row in inspection.most_alone(1):
        yield Tile("Worst alone", decibels_text(row.alone), row.module)
    if inspection.compared:
        yield Tile("At the end", decibels_text(inspection.compared[-1].accumulated), inspection.compared[-1].module)
    bad = [record for record in inspection.records if is_bad(record)]
    if bad:
        yield Tile("Not finite", number(len({record.layer for record in bad}), "layer"), f"first {bad[0].layer}")


def _first_bad(inspection: Inspection) -> Section:
    first = inspection.first_bad
    return Section("first", "The first NaN or infinity", [f"{first}."] if first else [])


def _about(inspection: Inspection) -> Section:
    rows = sorted(inspection.about.items())
    notes = [(note,) for note in inspection.notes]
    records = [
        (str(r.step), r.layer, r.role, r.tensor, r.stat, "not finite" if r.value is None else f"{r.value:.5g}")
        for r in inspection.records
    ]
    tables = [Table("Notes", ("note",), notes), Table("Made from", ("what", "value"), rows)]
    few = [Table("Values", COLUMNS, records, (0, 5))] if 0 < len(records) <= MAX_MARKS else []
    return Section("about", "Notes and origin", tables=[table for table in tables if table.rows], folded=few)


def worst(inspection: Inspection) -> Section:
    """The layers and tensors with the lowest signal to noise under each scheme."""
    rows = [
        (
            record.layer, record.role, record.tensor, scheme_of(inspection, record),
            "not finite" if record.value is None else f"{record.value:.1f}", "; ".join(_reasons(inspection, record)),
        )
        for record in worst_of(inspection, SHOWN)
    ]  # fmt: skip
    return Section("worst", "Worst tensors", tables=[Table("", WORST_COLUMNS, rows, (4,))] if rows else [])


def _reasons(inspection: Inspection, record: Record) -> Iterator[str]:
    """What the other statistics of the same tensor say."""
    place = record.step, record.layer, record.tensor
    if record.value is None or any(
        is_bad(other) for other in inspection.records if (other.step, other.layer, other.tensor) == place
    ):
        yield "NaN or infinity"
    own = statistics_of(inspection, *place)
    if (ratio := own.get("outlier_ratio", 0.0)) > OUTLIERS:
        yield f"outliers: amax {ratio:.0f} x p99.9"
    for stat, what in (("underflows%", "become zero"), ("overflows%", "cut off")):
        value = own.get(record.stat.removesuffix("sqnr") + stat, 0.0)
        if value > 1:
            yield f"{value:.1f} % {what}"


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


def compared(inspection: Inspection) -> Section:
    """Where errors begin, and how they grow."""
    rows = inspection.compared
    if not rows:
        return Section("compared", COMPARED)
    worst = [
        (
            row.module,
            row.role,
            decibels_text(row.alone),
            decibels_text(row.accumulated),
            f"{row.accumulated.cosine:.6f}",
        )
        for row in inspection.most_alone(WORST_MATRICES)
    ]
    every = [(row.module, row.kind, row.role, decibels_text(row.accumulated), decibels_text(row.alone)) for row in rows]
    own = [
        Cell(row.module, row.role, row.alone.sqnr) for row in rows if row.alone and math.isfinite(row.alone.decibels)
    ]
    columns = ("module", "role", "alone", "accumulated", "cosine")
    return Section(
        "compared",
        COMPARED,
        [COMPARED_HOW, COMPARED_WHY, NOISE],
        plots=[_in_order(rows), *([grid("Each matrix alone", own)] if own else [])],
        tables=[Table("Matrices whose own error is largest", columns, worst, (2, 3, 4))] if worst else [],
        folded=[
            Table(
                "All modules, in the order in which they finish",
                ("module", "kind", "role", "accumulated", "alone"),
                every,
                (3, 4),
            )
        ],
    )


def _in_order(rows: Sequence[Compared]) -> Plot:
    """Two dots a module in the order in which modules finish: accumulated, and alone."""
    shown = rows[:: max(1, -(-len(rows) // (MAX_MARKS // 2)))]
    dots = [
        (n, row.module, found.decibels, kind, what)
        for n, row in enumerate(shown)
        for found, kind, what in ((row.accumulated, "was", "accumulated"), (row.alone, "ok", "alone"))
        if found is not None and math.isfinite(found.decibels)
    ]
    values = [value for _, _, value, _, _ in dots] or [0.0]
    axis, step = Axis.over(values), (WIDTH - LEFT - 12) / max(len(shown), 1)
    marks = [
        Mark(LEFT + n * step, axis.y(value) - 2.5, 5, 5, f"{module}: {value:.1f} dB {what}", kind, 5)
        for n, module, value, kind, what in dots
    ]
    words = [*axis.words(), Word(LEFT, HEIGHT - 26, "first module", "start"), Word(WIDTH - 12, HEIGHT - 26, "last")]
    key = [("was", "accumulated"), ("ok", "alone")]
    span = f"{min(values):.1f} to {max(values):.1f} dB"
    about = f"{len(rows):,} modules from the first to the last, {span}; equal ones have no dot."
    return Plot("Signal to noise of each module's output, dB", about, HEIGHT - 14, axis.lines(), words, marks, key)
