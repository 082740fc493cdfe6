"""The report as one HTML page: no script, no font, no image from elsewhere; the same report gives the same page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import show

if TYPE_CHECKING:
    from bridge.report import Parity, Report

WIDTH, HEIGHT = 900, 240
LEFT, TOP, BOTTOM = 48, 12, 24
LABEL = 340  # room for a module's name before its bar
BAR = 18


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    right: Sequence[int] = ()


@dataclass(frozen=True)
class Line:
    x1: str
    y1: str
    x2: str
    y2: str


@dataclass(frozen=True)
class Word:
    x: str
    y: str
    text: str
    anchor: str = "end"


@dataclass(frozen=True)
class Mark:
    """A bar or a dot: a rectangle, rounded where it is a dot."""

    x: str
    y: str
    width: str
    height: str
    text: str
    passed: bool = True
    round: int = 0


@dataclass(frozen=True)
class Plot:
    title: str
    width: int
    height: int
    lines: Sequence[Line]
    words: Sequence[Word]
    marks: Sequence[Mark]


def render(report: Report) -> str:
    """Fill `templates/report.html.j2`; everything that comes from a model is escaped."""
    import jinja2

    template = Path(__file__).with_name("templates") / "report.html.j2"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    parity = report.parity
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        report=report,
        size=show.size,
        seconds=sum(report.seconds.values()),
        verdict=show.verdict(report),
        outputs=Table("", show.OUTPUTS, show.output_rows(parity) if parity else [], range(1, 7)),
        weights=Table("", show.WEIGHTS, show.weight_rows(parity) if parity else [], (1, 3, 4, 5, 6)),
        plots=_plots(parity) if parity else [],
        parts=_parts(report),
    )


def _parts(report: Report) -> list[Table]:
    reasons = ("n", "why", "what")
    return [
        Table("Not run", ("what, and why",), [(line,) for line in report.parity.not_run] if report.parity else []),
        Table("Policies applied", reasons, show.by_reason(report.policies), (0,)),
        Table("Not carried, quantized or run", reasons, show.by_reason(report.skipped), (0,)),
        Table("Findings of lint", ("finding",), [(line,) for line in report.findings]),
        Table("Notes", ("note",), [(line,) for line in report.notes]),
        Table("Seconds", ("stage", "seconds"), [(k, f"{v:.2f}") for k, v in report.seconds.items()], (1,)),
        Table("Versions", ("package", "version"), sorted(report.versions.items())),
    ]


def _plots(parity: Parity) -> list[Plot]:
    tensors = parity.tensors
    plots = []
    if tensors:
        marks = [(t.name, t.sqnr, f"{t.sqnr:.1f} dB", t.passed) for t in tensors]
        plots.append(_dots("SQNR of each weight, dB (higher is better)", marks))
        marks = [(t.name, max(1 - t.cosine, 1e-12), f"cosine {t.cosine:.6f}", t.passed) for t in tensors]
        logs = [(name, math.log10(value), text, passed) for name, value, text, passed in marks]
        plots.append(_dots("log10(1 - cosine) of each weight (lower is better)", logs))
    if parity.layers:
        plots.append(_bars("Damage to each module's own output, relative L2", parity.layers[:40]))
    return plots


def _dots(title: str, values: Sequence[tuple[str, float, str, bool]]) -> Plot:
    """One dot a tensor, in the order of the file."""
    finite = [value for _, value, _, _ in values if math.isfinite(value)] or [0.0]
    low, high = math.floor(min(finite)), math.ceil(max(finite))
    high = high if high > low else low + 1
    bottom = HEIGHT - BOTTOM

    def y(value: float) -> float:
        return bottom - (min(max(value, low), high) - low) / (high - low) * (bottom - TOP)

    ticks = [low + (high - low) * k / 4 for k in range(5)]
    lines = [Line(_at(LEFT), _at(y(tick)), _at(WIDTH), _at(y(tick))) for tick in ticks]
    words = [Word(_at(LEFT - 6), _at(y(tick) + 4), f"{tick:g}") for tick in ticks]
    words.append(Word(_at(WIDTH), _at(HEIGHT - 4), f"{len(values):,} weights in the order of the file"))
    step = (WIDTH - LEFT) / len(values)
    marks = [
        Mark(_at(LEFT + step * (n + 0.5) - 3), _at(y(value) - 3), "6", "6", f"{name}: {text}", passed, 3)
        for n, (name, value, text, passed) in enumerate(values)
    ]
    return Plot(title, WIDTH, HEIGHT, lines, words, marks)


def _bars(title: str, values: Sequence[tuple[str, float]]) -> Plot:
    """One bar a module, the worst on top."""
    most = max((value for _, value in values if math.isfinite(value)), default=0.0) or 1.0
    words, marks = [], []
    for n, (name, value) in enumerate(values):
        width = min(value, most) / most * (WIDTH - LABEL - 80) if math.isfinite(value) else 0.0
        words.append(Word(_at(LABEL - 8), _at(n * BAR + 13), name))
        words.append(Word(_at(LABEL + width + 6), _at(n * BAR + 13), f"{value:.2e}", "start"))
        marks.append(Mark(_at(LABEL), _at(n * BAR + 3), _at(width), _at(BAR - 6), f"{name}: {value:.2e}"))
    return Plot(title, WIDTH, len(values) * BAR + 4, [], words, marks)


def _at(value: float) -> str:
    return f"{value:.1f}"
