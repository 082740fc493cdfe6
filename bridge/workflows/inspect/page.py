"""The page of an inspection, from its records alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bridge.core.text import layer_of, pattern
from bridge.reporting.page import Page, Section, Table, Tile, html_of
from bridge.reporting.plots import (
    HEIGHT,
    LEFT,
    MAX_MARKS,
    MAX_ROWS,
    WIDTH,
    Axis,
    Line,
    Mark,
    Plot,
    Word,
    short,
)
from bridge.workflows.inspect.result import BELOW, COLUMNS, Inspection, Record, said
from bridge.workflows.inspect.side_by_side import Compared

WORST = 20
SHOWN_STEPS = 8  # lines of one plot
GRID_LEFT = 250  # width of the names beside a grid
CELL = 24  # height of a row of a grid
OUTLIERS = 20.0  # amax over the 99.9th percentile: with 7 bits, most values then fall on few codes
END = "Written by qbridge; inspect.json and statistics.csv have the same figures."
NOISE = "Statistics show where numbers are lost, not what that costs: `qbridge sensitivity` measures it."


def render(inspection: Inspection) -> str:
    """The page as HTML; equal inspections give equal pages."""
    return html_of(page_of(inspection))


def page_of(inspection: Inspection) -> Page:
    sections = [_grids(inspection), _worst(inspection), _compared(inspection), _steps(inspection), _about(inspection)]
    about = inspection.about
    layers = len({record.layer for record in inspection.records})
    what = (
        f"{len(inspection.records):,} values of {layers:,} layers" if layers else f"Beside {about.get('against', '')}"
    )
    scheme = f", scheme {about['scheme']}" if about.get("scheme") else ""
    return Page(
        title=about.get("model", "inspection"),
        line=f"{what}{scheme}.",
        passed=True,
        verdict="",
        tiles=list(_tiles(inspection)),
        sections=[s for s in sections if s.plots or s.tables or s.folded],
        judged="",
        end=END,
    )


def _tiles(inspection: Inspection) -> Iterator[Tile]:
    for scheme, records in _by_scheme(inspection).items():
        finite = [r.value for r in records if r.value is not None]
        if finite:
            yield Tile(f"Worst of {scheme or 'the scheme'}", f"{min(finite):.1f}", "dB, signal to noise")
    for row in inspection.most_alone(1):
        yield Tile("Worst alone", said(row.alone), row.module)
    if inspection.compared:
        yield Tile("At the end", said(inspection.compared[-1].accumulated), inspection.compared[-1].module)
    bad = [r for r in inspection.records if r.value is None or (r.stat in ("nan%", "inf%") and r.value)]
    if bad:
        yield Tile("Not finite", f"{len({r.layer for r in bad}):,}", f"layers, first {bad[0].layer}")


def _by_scheme(inspection: Inspection) -> dict[str, list[Record]]:
    """The SQNRs by scheme and tensor, of the last step in which each was taken."""
    found: dict[str, dict[str, Record]] = {}
    for record in inspection.records:
        if record.stat.endswith("sqnr") and record.tensor in ("activation", "weight"):
            scheme = record.stat.removesuffix("sqnr").rstrip("_")
            found.setdefault(f"{scheme} {record.tensor}".strip(), {})[record.layer] = record
    return {name: list(records.values()) for name, records in found.items()}


def _grids(inspection: Inspection) -> Section:
    plots = [_grid(name, records) for name, records in _by_scheme(inspection).items()]
    return Section("grid", "Signal to noise by layer and kind", [NOISE] if plots else [], plots=plots)


def _grid(name: str, records: Sequence[Record]) -> Plot:
    """A row a kind of layer, a column a layer; a cell is filled from below, 60 dB fill it."""
    kinds = list(dict.fromkeys(record.role or pattern(record.layer) for record in records))[:MAX_ROWS]
    columns = sorted({layer_of(record.layer) for record in records}, key=lambda n: math.inf if n is None else n)
    step = (WIDTH - GRID_LEFT) / len(columns)
    marks, words = list[Mark](), [Word(GRID_LEFT - 8, n * CELL + 16, short(kind)) for n, kind in enumerate(kinds)]
    for record in records:
        kind = record.role or pattern(record.layer)
        if kind not in kinds:
            continue
        top, left = kinds.index(kind) * CELL + 2, GRID_LEFT + columns.index(layer_of(record.layer)) * step
        value = record.value
        height = max(2.0, min(value, 60.0) / 60 * (CELL - 4)) if value is not None and value > 0 else 2.0
        low = value is None or value < BELOW
        text = f"{record.layer}: {'not finite' if value is None else f'{value:.1f} dB'}" + (", below" if low else "")
        marks.append(Mark(left + 1, top + CELL - 4 - height, max(step - 2, 1.0), height, text, "low" if low else "ok"))
    every = max(1, len(columns) // 16)
    bottom = len(kinds) * CELL + 14
    words += [
        Word(GRID_LEFT + (n + 0.5) * step, bottom, "other" if column is None else str(column), "middle")
        for n, column in enumerate(columns)
        if n % every == 0 or column is None
    ]
    finite = [record.value for record in records if record.value is not None]
    span = f"from {min(finite):.1f} to {max(finite):.1f} dB" if finite else "none of them finite"
    lines = [Line(GRID_LEFT, (n + 1) * CELL - 1, WIDTH, (n + 1) * CELL - 1) for n in range(len(kinds))]
    key = [("ok", f"{BELOW:g} dB and more"), ("low", "less")]
    about = f"{len(records):,} layers, {span}; the higher a cell is filled, the less is lost, 60 dB fill it."
    return Plot(name, about, bottom + 8, lines, words, marks, key)


def _worst(inspection: Inspection) -> Section:
    rows = []
    for record in (r for records in _by_scheme(inspection).values() for r in records):
        rows.append((math.inf if record.value is None else -record.value, record))
    rows.sort(key=lambda row: (-row[0], row[1].layer, row[1].stat))
    cells = [
        (
            r.layer,
            r.role,
            r.tensor,
            r.stat,
            "not finite" if r.value is None else f"{r.value:.1f}",
            _reason(inspection, r),
        )
        for _, r in rows[:WORST]
    ]
    return Section(
        "worst",
        "Worst layers",
        tables=_shown(Table("", ("layer", "role", "tensor", "statistic", "value", "why"), cells, (4,))),
    )


def _reason(inspection: Inspection, worst: Record) -> str:
    """What the other statistics of the same tensor say."""
    own = {
        record.stat: record.value
        for record in inspection.records
        if (record.layer, record.tensor, record.step) == (worst.layer, worst.tensor, worst.step)
    }
    why = []
    if any(own.get(stat) for stat in ("nan%", "inf%")) or worst.value is None:
        why.append("NaN or infinity")
    if (ratio := own.get("outlier_ratio")) and ratio > OUTLIERS:
        why.append(f"outliers: amax is {ratio:.0f} x the 99.9th percentile")
    for stat, what in (("underflows%", "become zero"), ("overflows%", "beyond the scale")):
        value = own.get(worst.stat.removesuffix("sqnr") + stat)
        if value and value > 1:
            why.append(f"{value:.1f} % {what}")
    return "; ".join(why)


def _compared(inspection: Inspection) -> Section:
    title, rows = "Beside the source", inspection.compared
    if not rows:
        return Section("compared", title)
    worst = [
        (row.module, said(row.alone), said(row.accumulated), f"{row.accumulated.cosine:.6f}")
        for row in inspection.most_alone(WORST)
    ]
    every = [(row.module, row.kind, said(row.accumulated), said(row.alone)) for row in rows]
    return Section(
        "compared",
        title,
        ["Alone: with the input that the source has there. Accumulated: with all errors of the modules before."],
        plots=[_both(rows)],
        tables=_shown(
            Table("Matrices whose own error is largest", ("module", "alone", "accumulated", "cosine"), worst, (1, 2, 3))
        ),
        folded=_shown(
            Table(
                "All modules, in the order in which they finish",
                ("module", "kind", "accumulated", "alone"),
                every,
                (2, 3),
            )
        ),
    )


def _both(rows: Sequence[Compared]) -> Plot:
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
    key = [("was", "accumulated"), ("ok", "alone")]
    span = f"{min(values):.1f} to {max(values):.1f} dB"
    about = f"{len(rows):,} modules from the first to the last, {span}; equal ones have no dot."
    return Plot("Signal to noise of each module's output, dB", about, HEIGHT, axis.lines(), axis.words(), marks, key)


def _steps(inspection: Inspection) -> Section:
    """Each statistic of the worst layers over steps, where there are several."""
    plots = []
    stats = dict.fromkeys(r.stat for r in inspection.records)
    for stat in stats:
        rows: dict[tuple[str, str], list[Record]] = {}
        for record in inspection.records:
            if record.stat == stat and record.value is not None:
                rows.setdefault((record.layer, record.tensor), []).append(record)
        several = {key: found for key, found in rows.items() if len(found) > 1}
        if several:
            plots.append(_over_steps(stat, several))
    return Section("steps", "Over steps", plots=plots[:SHOWN_STEPS])


def _over_steps(stat: str, rows: dict[tuple[str, str], list[Record]]) -> Plot:
    """Dots by step of the layers whose statistic moved most."""

    def moved(found: Sequence[Record]) -> float:
        values = [record.value or 0.0 for record in found]
        return (max(values) - min(values)) / (max(map(abs, values)) or 1.0)

    shown = sorted(rows.items(), key=lambda row: (-moved(row[1]), row[0]))[:SHOWN_STEPS]
    records = [record for _, found in shown for record in found]
    axis, last = Axis.over([record.value or 0.0 for record in records]), max(record.step for record in records)
    every = max(1, -(-len(records) // MAX_MARKS))
    marks = [
        Mark(LEFT + (WIDTH - LEFT - 12) * r.step / max(last, 1) - 2.5, axis.y(r.value or 0.0) - 2.5, 5, 5,
             f"step {r.step}: {r.value:.4g}, {r.tensor} of {r.layer}", "ok", 5)
        for r in records[::every]
    ]  # fmt: skip
    words = [*axis.words(), Word(LEFT, HEIGHT - 16, "step 0", "start"), Word(WIDTH - 12, HEIGHT - 16, f"step {last:,}")]
    named = ", ".join(f"{tensor} of {layer}" for layer, tensor in (key for key, _ in shown[:3]))
    return Plot(stat, f"The {len(shown)} tensors that moved most: {named}.", HEIGHT, axis.lines(), words, marks)


def _about(inspection: Inspection) -> Section:
    rows = sorted(inspection.about.items())
    notes = [(note,) for note in inspection.notes]
    records = [(str(r.step), r.layer, r.role, r.tensor, r.stat, _said(r.value)) for r in inspection.records]
    tables = _shown(Table("Notes", ("note",), notes), Table("Made from", ("what", "value"), rows))
    few = _shown(Table("Values", COLUMNS, records, (0, 5))) if len(records) <= MAX_MARKS else []
    return Section("about", "Made from", tables=tables, folded=few)


def _said(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def _shown(*tables: Table) -> list[Table]:
    return [table for table in tables if table.rows]
