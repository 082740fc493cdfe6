"""A quantized model beside its source."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bridge.reporting.page import Section, Table
from bridge.reporting.plots import HEIGHT, LEFT, MAX_MARKS, WIDTH, Axis, Mark, Plot, Word
from bridge.workflows.inspect.page.grids import Cell, grid
from bridge.workflows.inspect.page.schemes import NOISE
from bridge.workflows.inspect.result import Inspection, said
from bridge.workflows.inspect.side_by_side import Compared

WORST = 20
TITLE = "Beside the source"
TWO = "Alone: with the input that the source has there. Accumulated: with all errors of the modules before."
ERRORS = "A matrix that is bad alone makes an error; one that is bad accumulated only passes it on."


def compared(inspection: Inspection) -> Section:
    """Where errors begin, and how they grow."""
    rows = inspection.compared
    if not rows:
        return Section("compared", TITLE)
    worst = [
        (row.module, row.role, said(row.alone), said(row.accumulated), f"{row.accumulated.cosine:.6f}")
        for row in inspection.most_alone(WORST)
    ]
    every = [(row.module, row.kind, row.role, said(row.accumulated), said(row.alone)) for row in rows]
    own = [
        Cell(row.module, row.role, row.alone.sqnr) for row in rows if row.alone and math.isfinite(row.alone.decibels)
    ]
    columns = ("module", "role", "alone", "accumulated", "cosine")
    return Section(
        "compared",
        TITLE,
        [TWO, ERRORS, NOISE],
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
