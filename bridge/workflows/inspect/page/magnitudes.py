"""Magnitudes by power of two, and what each scheme makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from bridge.reporting.page import Section
from bridge.reporting.plots import WIDTH, Line, Mark, Plot, Word
from bridge.workflows.inspect.page.grids import statistics_of, worst_of
from bridge.workflows.inspect.result import CodeRange, Inspection, Magnitudes

SHOWN = 6  # tensors, the worst
LEFT, RIGHT = 120, 170  # widths of the names of schemes, and of what is lost
NAME, BARS, STRIP = 24, 44, 15  # heights
TITLE = "Magnitudes by power of two"
BARS_SHOW = "Bars: how many values of a tensor lie between two powers of two; heights are logarithmic."
STRIPS_SHOW = (
    "Strips: what each scheme does to values of that size, by the scales that the tensor had. A value below half the "
    "least code times its scale becomes zero."
)
KEY = [
    ("was", "values"),
    ("ok", "kept"),
    ("more", "zero in blocks with a large scale"),
    ("low", "becomes zero, or is cut off at the largest code"),
]


def magnitudes(inspection: Inspection) -> Section:
    """The worst tensors whose magnitudes were counted, at the step in which they were worst."""
    shown = _worst(inspection)
    if not shown:
        return Section("magnitudes", TITLE)
    plots = [_plot(row, statistics_of(inspection, row.step, row.layer, row.tensor)) for row in shown]
    schemes = any(row.ranges for row in shown)
    plots[0] = replace(plots[0], key=KEY if schemes else ())
    return Section("magnitudes", TITLE, [BARS_SHOW, *([STRIPS_SHOW] if schemes else [])], plots=plots)


def _worst(inspection: Inspection) -> list[Magnitudes]:
    """The worst tensors under each scheme, one for all layers that read it; the first ones if none was measured."""
    counted = {(row.step, row.layer, row.tensor): row for row in inspection.magnitudes if row.counts}
    worst = ((record.step, record.layer, record.tensor) for record in worst_of(inspection, 4 * SHOWN))
    last = {(layer, tensor): row for (_, layer, tensor), row in counted.items()}
    rows: dict[tuple[str, str], Magnitudes] = {}
    for row in (*(counted[key] for key in worst if key in counted), *last.values()):
        rows.setdefault((row.layer, row.tensor), row)
    shown: dict[tuple[str, object, int], Magnitudes] = {}
    for row in rows.values():
        shown.setdefault((row.tensor, row.counts, row.zeros), row)
    return [*shown.values()][:SHOWN]


def _plot(row: Magnitudes, stats: Mapping[str, float]) -> Plot:
    low, high = row.counts[0][0], row.counts[-1][0] + 1
    step = (WIDTH - LEFT - RIGHT) / (high - low)
    largest = max(count for _, count in row.counts)
    marks = []
    for power, count in row.counts:
        height = 3 + (BARS - 9) * math.log1p(count) / math.log1p(largest)
        text = f"{count:,} from 2^{power} to 2^{power + 1}"
        marks.append(Mark(LEFT + (power - low) * step + 0.5, BARS - height, max(step - 1, 1.0), height, text, "was"))
    words = [Word(LEFT - 8, BARS - 4, "values")]
    for n, reach in enumerate(row.ranges):
        top = BARS + 5 + n * STRIP
        words.append(Word(LEFT - 8, top + 9, reach.scheme))
        words.append(Word(WIDTH - RIGHT + 8, top + 9, _lost(reach, stats), "start"))
        for begin, end, text, kind in _zones(reach, low, high):
            left = LEFT + (begin - low) * step
            marks.append(Mark(left, top, (end - begin) * step, STRIP - 5.0, f"{reach.scheme}: {text}", kind))
    below = BARS + 5 + len(row.ranges) * STRIP + 10
    every = -(-(high - low) // 10)
    words += [Word(LEFT + (at - low) * step, below, f"2^{at}", "middle") for at in range(low, high + 1, every)]
    total = sum(count for _, count in row.counts) + row.zeros
    zeros = f", {row.zeros / total:.1%} of them zero" if row.zeros else ""
    about = f"{total:,} values{zeros}, from 2^{low} to 2^{high}."
    lines = [Line(LEFT, BARS + 1, WIDTH - RIGHT, BARS + 1)]
    return Plot(f"{row.tensor} of {row.layer}", about, below + 8, lines, words, marks)


def _zones(reach: CodeRange, low: int, high: int) -> Iterator[tuple[float, float, str, str]]:
    """From and to as powers of two, what happens there, and the kind of the mark."""
    zero, kept = (min(max(math.log2(value), low), high) for value in (reach.zero_below, reach.kept_from))
    cut = min(max(math.log2(reach.cut_above), kept), high) if reach.cut_above else high
    zones = [
        (low, zero, f"all below {reach.zero_below:.3g} become zero", "low"),
        (zero, kept, f"up to {reach.kept_from:.3g} zero in blocks with a large scale", "more"),
        (kept, cut, "kept", "ok"),
        (cut, high, f"above {reach.cut_above or 0:.3g} cut off", "low"),
    ]
    yield from (zone for zone in zones if zone[1] > zone[0])


def _lost(reach: CodeRange, stats: Mapping[str, float]) -> str:
    """What was measured of a scheme, in words."""
    found = []
    for stat, what in (("underflows%", "become zero"), ("overflows%", "cut off")):
        value = stats.get(f"{reach.scheme}_{stat}", stats.get(stat))
        if value is not None and (value or stat == "underflows%"):
            found.append(f"{value:.1f} % {what}" if value >= 1 else f"{value:.2g} % {what}")
    return ", ".join(found)
