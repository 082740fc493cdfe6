"""The sections of the page and its head."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.core.text import number
from bridge.reporting.page import Page, Section, Table, Tile, html_of
from bridge.reporting.plots import MAX_MARKS
from bridge.workflows.inspect.page.compared import compared
from bridge.workflows.inspect.page.costs import costs
from bridge.workflows.inspect.page.grids import grids
from bridge.workflows.inspect.page.magnitudes import magnitudes
from bridge.workflows.inspect.page.over_steps import over_steps
from bridge.workflows.inspect.page.schemes import losses_by_scheme
from bridge.workflows.inspect.page.worst import worst
from bridge.workflows.inspect.result import COLUMNS, Inspection, is_bad, said

END = "Written by qbridge; inspect.json and statistics.csv have the same figures."


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
        yield Tile("Worst alone", said(row.alone), row.module)
    if inspection.compared:
        yield Tile("At the end", said(inspection.compared[-1].accumulated), inspection.compared[-1].module)
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
