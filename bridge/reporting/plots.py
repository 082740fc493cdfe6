"""Plots of the page as lines, words and marks on a canvas; knows no HTML, and never draws more marks than it is told.

What a plot shows is said in its `about`, too, and every mark has a text: nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bridge.report import Coverage, Parity, ScaleRange, Storage, TensorParity
from bridge.show import grouped, layer_of, pattern, size

WIDTH, HEIGHT = 900, 260
LEFT, TOP, BOTTOM = 64, 14, 44
LABEL = 330  # room for a name before its bar: 52 characters
LONGEST = 52
ROW, BAR = 22, 12
RIDGE = 40  # height of one histogram
MARKS = 1500  # of one plot; beyond, only the worst of each layer is drawn
MOST = 40  # rows of one plot


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
    """A bar, or a dot where it is rounded. `kind`: "ok", "low" (failed), "was" (before), "more" (scales)."""

    x: str
    y: str
    width: str
    height: str
    text: str
    kind: str = "ok"
    round: int = 0


@dataclass(frozen=True)
class Plot:
    """`about` says in words what the marks show; `key` explains kinds of marks that differ."""

    title: str
    about: str
    height: int
    lines: Sequence[Line]
    words: Sequence[Word]
    marks: Sequence[Mark]
    key: Sequence[tuple[str, str]] = ()
    width: int = WIDTH


def parity_plots(parity: Parity) -> list[Plot]:
    """SQNR and cosine of each weight by layer, and what hurts each module's own output."""
    plots = []
    if parity.tensors:
        plots += [
            _by_layer("Signal to noise of each weight, dB: higher is better", parity.tensors, lambda t: t.decibels),
            _by_layer("Direction of each weight, log10(1 - cosine): lower is better", parity.tensors, _direction),
        ]
    if parity.layers:
        plots.append(_damage(parity.layers))
    return plots


def _direction(t: TensorParity) -> float:
    return math.log10(1 - t.cosine) if t.cosine < 1 else -math.inf


def _by_layer(title: str, tensors: Sequence[TensorParity], measure: Callable[[TensorParity], float]) -> Plot:
    """One dot a weight (of experts the worst one) over its layer; what is in no layer comes last."""
    shown = [worst(group) for group in grouped(tensors, lambda t: (layer_of(t.name), pattern(t.name)))]
    if len(shown) > MARKS:
        shown = [worst(group) for group in grouped(shown, lambda t: layer_of(t.name))]
    values = [measure(t) for t in shown]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    axis, layers = Axis.over(finite), Layers.of(shown)
    turns, marks = Counter[int | None](), []
    for t, value in zip(shown, values, strict=True):
        layer = layer_of(t.name)
        marks.append(_dot(t, value, layers.x(layer, turns[layer]), axis.y(value)))
        turns[layer] += 1
    failed = sum(not t.passed for t in tensors)
    about = (
        f"{len(shown):,} of {len(tensors):,} weights, from {min(finite):.2f} to {max(finite):.2f}; "
        f"{failed} below their gate."
    )
    key = [("ok", "passed"), ("low", "below its gate")] if failed else []
    return Plot(title, about, HEIGHT, axis.lines(), [*axis.words(), *layers.words()], marks, key)


def worst(group: Sequence[TensorParity]) -> TensorParity:
    """The one that stands for the others: it failed, or its noise is the largest."""
    return min(group, key=lambda t: (t.passed, t.sqnr))


def _dot(t: TensorParity, value: float, x: float, y: float) -> Mark:
    """A disc; a larger square where a gate failed."""
    side = 7 if t.passed else 9
    text = f"{t.name}: {lost(value, t)}" + ("" if t.passed else ", BELOW its gate")
    kind, turned = ("ok", 4) if t.passed else ("low", 0)
    return Mark(_at(x - side / 2), _at(y - side / 2), str(side), str(side), text, kind, turned)


def lost(value: float, t: TensorParity, digits: int = 2) -> str:
    """A measure of a weight in words where it is not finite."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "nothing lost" if t.decibels > 0 else "nothing left"


@dataclass(frozen=True)
class Layers:
    """A horizontal axis with a column for each layer, and one more (None) for what is in no layer."""

    columns: Sequence[int | None]
    crowded: bool  # dots of one layer lie beside each other

    @classmethod
    def of(cls, tensors: Sequence[TensorParity]) -> Layers:
        found = {layer_of(t.name) for t in tensors}
        columns = [*sorted(layer for layer in found if layer is not None), *([None] if None in found else [])]
        return cls(columns, len(tensors) > len(columns))

    @property
    def step(self) -> float:
        return (WIDTH - LEFT - 8) / len(self.columns)

    def x(self, layer: int | None, turn: int = 0) -> float:
        beside = min(self.step * 0.8, 90.0) / 8 * (turn % 8 - 3.5) if self.crowded else 0.0
        return LEFT + self.step * (self.columns.index(layer) + 0.5) + beside

    def words(self) -> list[Word]:
        every = max(len(self.columns) // 16, 1)
        words = [
            Word(_at(LEFT + self.step * (at + 0.5)), _at(HEIGHT - BOTTOM + 16), str(layer), "middle")
            for at, layer in enumerate(self.columns)
            if layer is not None and at % every == 0
        ]
        if None in self.columns:
            words.append(Word(_at(WIDTH - 8), _at(HEIGHT - BOTTOM + 16), "other"))
        return [*words, Word(_at((LEFT + WIDTH) / 2), _at(HEIGHT - 8), "layer", "middle")]


@dataclass(frozen=True)
class Axis:
    """A vertical axis from `low` at the bottom to `high` on top; what lies outside is drawn at its end."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Axis:
        """From the whole number below the least to the one above the largest."""
        low = math.floor(min(values))
        return cls(low, max(math.ceil(max(values)), low + 1))

    def y(self, value: float) -> float:
        bottom = HEIGHT - BOTTOM
        value = min(max(value, self.low), self.high)
        return bottom - (value - self.low) / (self.high - self.low) * (bottom - TOP)

    def ticks(self) -> list[float]:
        return [self.low + (self.high - self.low) * k / 4 for k in range(5)]

    def lines(self) -> list[Line]:
        return [Line(_at(LEFT), _at(self.y(tick)), _at(WIDTH), _at(self.y(tick))) for tick in self.ticks()]

    def words(self) -> list[Word]:
        return [Word(_at(LEFT - 8), _at(self.y(tick) + 4), f"{tick:g}") for tick in self.ticks()]


def _damage(values: Sequence[tuple[str, float]]) -> Plot:
    """One bar a module, the worst on top."""
    shown = values[:MOST]
    most = max((value for _, value in shown if math.isfinite(value)), default=0.0) or 1.0
    words, marks = [], []
    for n, (name, value) in enumerate(shown):
        width = min(value, most) / most * (WIDTH - LABEL - 80) if math.isfinite(value) else 0.0
        words += [
            Word(_at(LABEL - 8), _at(n * ROW + 15), short(name)),
            Word(_at(LABEL + width + 6), _at(n * ROW + 15), f"{value:.2e}", "start"),
        ]
        marks.append(Mark(_at(LABEL), _at(n * ROW + 5), _at(width), str(BAR), f"{name}: {value:.2e}"))
    about = f"The {len(shown)} of {len(values):,} modules that are hurt most, from {most:.2e}."
    title = "Error of each module's own output, relative L2: what quantizing it adds"
    return Plot(title, about, len(shown) * ROW + 8, [], words, marks)


def storage_plot(rows: Sequence[Storage]) -> Plot | None:
    """Two bars a kind of tensor: what it took, and what its codes and scales take."""
    shown = sorted(rows, key=lambda row: -row.before - row.codes - row.scales)[:MOST]
    most = max((max(row.before, row.codes + row.scales) for row in shown), default=0)
    if not most:
        return None
    unit, words, marks = (WIDTH - LABEL - 130) / most, [], []
    for n, row in enumerate(shown):
        y = n * (ROW + 12) + 4
        after = row.codes + row.scales
        words.append(Word(_at(LABEL - 8), _at(y + 17), short(row.kind)))
        words.append(
            Word(
                _at(LABEL + max(row.before, after) * unit + 6),
                _at(y + 17),
                f"{size(row.before)} → {size(after)}",
                "start",
            )
        )
        marks.append(
            Mark(_at(LABEL), _at(y), _at(row.before * unit), "11", f"{row.kind}: {size(row.before)} before", "was")
        )
        text = f"{row.kind}: {size(row.codes)} of codes or values"
        marks.append(Mark(_at(LABEL), _at(y + 13), _at(row.codes * unit), "11", text))
        text = f"{row.kind}: {size(row.scales)} of scales"
        marks.append(Mark(_at(LABEL + row.codes * unit), _at(y + 13), _at(row.scales * unit), "11", text, "more"))
    before, after = sum(row.before for row in rows), sum(row.codes + row.scales for row in rows)
    about = (
        f"{size(before)} in the source, {size(after)} written, by kind of tensor; the {len(shown)} largest are drawn."
    )
    key = [("was", "source"), ("ok", "written: codes or values"), ("more", "written: scales")]
    return Plot("Bytes by kind of tensor, before and after", about, len(shown) * (ROW + 12) + 8, [], words, marks, key)


@dataclass(frozen=True)
class Bar:
    """One bar of a row: its column, how tall by its count, and what it says."""

    column: int
    count: int
    text: str
    kind: str = "ok"


def scales_plot(ranges: Sequence[ScaleRange]) -> Plot | None:
    """One histogram a kind of tensor over powers of two."""
    if not ranges:
        return None
    shown = ranges[:MOST]
    low, high = min(r.low for r in shown), max(r.low + len(r.counts) for r in shown)
    rows = [
        (
            row.kind,
            [
                Bar(power - low, count, f"{row.kind}: {count:,} of {sum(row.counts):,} from 2^{power} to 2^{power + 1}")
                for power, count in enumerate(row.counts, row.low)
                if count
            ],
        )
        for row in shown
    ]
    ticks: dict[float, str] = {power - low: f"2^{power}" for power in range(low, high + 1, max((high - low) // 10, 1))}
    about = f"{sum(r.scales for r in ranges):,} scales of weights from 2^{low} to 2^{high}; heights are logarithmic."
    return _rows_of_bars("Weight scales by kind of tensor", about, rows, high - low, ticks)


def experts_plot(layers: Sequence[Coverage]) -> Plot | None:
    """Tokens of each expert, a row a layer; where not all are drawn, those with the least covered experts."""
    experts = max((len(layer.tokens) for layer in layers), default=0)
    if not experts:
        return None
    least = sorted(layers, key=lambda layer: min(layer.tokens))[: min(max(MARKS // experts, 1), MOST)]
    rows = [
        (layer.module, [_covered(layer.module, expert, count) for expert, count in enumerate(layer.tokens)])
        for layer in layers
        if layer in least
    ]
    ticks = {expert + 0.5: str(expert) for expert in range(0, experts, max(experts // 16, 1))}
    unseen = sum(len(layer.unseen) for layer in layers)
    about = (
        f"{len(rows)} of {len(layers)} layers, {experts} experts each; heights are logarithmic. "
        f"{unseen} experts got no token."
    )
    key = [("ok", "tokens"), ("low", "never seen")] if unseen else []
    return _rows_of_bars("Calibration tokens by expert", about, rows, experts, ticks, key)


def _covered(module: str, expert: int, count: int) -> Bar:
    if not count:
        return Bar(expert, 0, f"{module}.{expert}: never seen", "low")
    return Bar(expert, count, f"{module}.{expert}: {count:,} tokens")


def _rows_of_bars(
    title: str,
    about: str,
    rows: Sequence[tuple[str, Sequence[Bar]]],
    columns: int,
    ticks: Mapping[float, str],
    key: Sequence[tuple[str, str]] = (),
) -> Plot:
    """Bars of logarithmic height over common columns; what was counted zero times stands out by its shape, too."""
    step, words, marks, lines = (WIDTH - LABEL - 16) / columns, [], [], []
    for n, (name, bars) in enumerate(rows):
        bottom = (n + 1) * RIDGE
        lines.append(Line(_at(LABEL), _at(bottom), _at(WIDTH - 8), _at(bottom)))
        words.append(Word(_at(LABEL - 8), _at(bottom - 4), short(name)))
        most = max(bar.count for bar in bars)
        for bar in bars:
            tall = (RIDGE - 8) * math.log1p(bar.count) / math.log1p(most) if bar.count else 5.0
            left, width = LABEL + bar.column * step + 0.5, max(step - 1, 1)
            marks.append(Mark(_at(left), _at(bottom - tall), _at(width), _at(tall), bar.text, bar.kind))
    below = len(rows) * RIDGE + 18
    words += [Word(_at(LABEL + at * step), _at(below), text, "middle") for at, text in ticks.items()]
    return Plot(title, about, below + 10, lines, words, marks, key)


def short(name: str) -> str:
    """The end of a name that is too long for its place."""
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def _at(value: float) -> str:
    return f"{value:.1f}"
