"""Grids of signal to noise by scheme, kind and layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.core.text import grouped, layer_of, number, pattern
from bridge.reporting.page import Section
from bridge.reporting.plots import MAX_ROWS, WIDTH, Line, Mark, Plot, Word, short
from bridge.workflows.inspect.result import BELOW, Inspection, Record, badness

LEFT = 250  # width of the names beside a grid, at most
LETTER = 7
ROW = 24  # height of a row
FULL = 60.0  # dB that fill a cell
NOISE = (
    "Statistics show where numbers are lost, not what that costs: over the layers of a model, signal to noise and the "
    "measured cost correlated by 0.75 (int8_sq), 0.54 (fp8) and -0.23 (int4_wo), by rank. qbridge sensitivity measures "
    "the cost."
)


@dataclass(frozen=True)
class Cell:
    """One layer of a grid: its name, its role ("" without one), and a value in dB, None where it is not finite."""

    name: str
    role: str
    value: float | None

    @property
    def kind(self) -> str:
        return self.role or pattern(self.name)

    @property
    def badness(self) -> float:
        return math.inf if self.value is None else -self.value

    def text(self, of: int) -> str:
        layer = layer_of(self.name)
        name = f"{self.role}, layer {layer}" if self.role and layer is not None and of == 1 else self.name
        value = "not finite" if self.value is None else f"{self.value:.1f} dB"
        return f"{name}: {value}" + (f", worst of {of}" if of > 1 else "")


def grids(inspection: Inspection) -> Section:
    """A grid for each scheme and tensor."""
    plots = [
        grid(name, [Cell(record.layer, record.role, record.value) for record in records])
        for name, records in losses_by_scheme(inspection).items()
    ]
    return Section("grid", "Signal to noise by layer and kind", [NOISE] if plots else [], plots=plots)


def grid(title: str, cells: Sequence[Cell]) -> Plot:
    """A cell is filled from below; of several layers in one cell (experts) the worst is drawn."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells))[:MAX_ROWS]
    columns = sorted({layer_of(cell.name) for cell in cells}, key=lambda n: math.inf if n is None else n)
    names = min(LEFT, 20 + LETTER * max(map(len, kinds)))
    step = (WIDTH - names) / len(columns)
    marks, words = list[Mark](), [Word(names - 8, n * ROW + 16, short(kind)) for n, kind in enumerate(kinds)]
    for group in grouped((cell for cell in cells if cell.kind in kinds), lambda cell: (cell.kind, layer_of(cell.name))):
        worst = max(group, key=lambda cell: cell.badness)
        left, bottom = names + columns.index(layer_of(worst.name)) * step, (kinds.index(worst.kind) + 1) * ROW - 2
        filled = min(worst.value, FULL) / FULL if worst.value is not None and worst.value > 0 else 0.0
        height = max(2, round(filled * (ROW - 4)))
        low = worst.value is None or worst.value < BELOW
        kind, width = "low" if low else "ok", max(round(min(step - 2, 60)), 1)
        marks.append(Mark(left + 1, bottom - height, width, height, worst.text(len(group)), kind))
    every = max(1, len(columns) // 16)
    below = len(kinds) * ROW + 14
    words += [
        Word(
            names + n * step + 1 + min(step - 2, 60.0) / 2, below, "other" if column is None else str(column), "middle"
        )
        for n, column in enumerate(columns)
        if n % every == 0 or column is None
    ]
    lines = [Line(names, (n + 1) * ROW - 1, WIDTH, (n + 1) * ROW - 1) for n in range(len(kinds))]
    key = [("ok", f"{BELOW:g} dB and more"), ("low", "less")]
    return Plot(title, _about(cells), below + 8, lines, words, marks, key)


def _about(cells: Sequence[Cell]) -> str:
    finite = [cell.value for cell in cells if cell.value is not None]
    span = f"from {min(finite):.1f} to {max(finite):.1f} dB" if finite else "none of them finite"
    low = sum(cell.value is None or cell.value < BELOW for cell in cells)
    return (
        f"{number(len(cells), 'layer')}, {span}, {low:,} below {BELOW:g}; the higher a cell is filled, the less is "
        f"lost, {FULL:g} dB fill it."
    )


def losses_by_scheme(inspection: Inspection) -> dict[str, list[Record]]:
    """The SQNRs by scheme and tensor, each the worst of all steps."""
    found: dict[str, dict[str, Record]] = {}
    for record in inspection.records:
        if record.stat.endswith("sqnr") and record.tensor in ("activation", "weight"):
            name = f"{scheme_of(inspection, record)} {record.tensor}".strip()
            layers = found.setdefault(name, {})
            if record.layer not in layers or badness(record, True) > badness(layers[record.layer], True):
                layers[record.layer] = record
    return {name: list(records.values()) for name, records in found.items()}


def scheme_of(inspection: Inspection, record: Record) -> str:
    """The scheme of an SQNR: that of the session if it names none."""
    return record.stat.removesuffix("sqnr").rstrip("_") or inspection.about.get("scheme", "")


def worst_of(inspection: Inspection, n: int) -> list[Record]:
    """The worst SQNRs, `n` in all: as many of each scheme, one scheme after the other, the worst first."""
    by_scheme: dict[str, list[Record]] = {}
    for records in losses_by_scheme(inspection).values():
        by_scheme.setdefault(scheme_of(inspection, records[0]), []).extend(records)
    found: list[Record] = []
    for records in by_scheme.values():
        records.sort(key=lambda record: (-badness(record, True), record.layer, record.tensor))
        found += records[: max(1, n // len(by_scheme))]
    return found


def statistics_of(inspection: Inspection, step: int, layer: str, tensor: str) -> dict[str, float]:
    """The finite statistics of one tensor at a step, by name."""
    return {
        record.stat: record.value
        for record in inspection.records
        if (record.step, record.layer, record.tensor) == (step, layer, tensor) and record.value is not None
    }
