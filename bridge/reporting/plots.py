"""Plots of the page as lines, words and marks, without HTML.

`about` describes each plot in words, and every mark has a text: nothing depends on colour alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bridge.core.text import grouped, layer_of, pattern, size
from bridge.reporting.labels import Mark as Mark
from bridge.reporting.labels import Word as Word
from bridge.reporting.labels import around, beside
from bridge.reporting.report import Coverage, Storage
from bridge.reporting.rows import worst
from bridge.sources.live_models.distillation import Distillation
from bridge.verification.parity import Parity, ScaleRange, TensorParity

WIDTH, HEIGHT = 900, 260
LEFT, TOP, BOTTOM = 64, 14, 44
LABEL = 330  # width of a name before its bar: 52 characters
MAX_NAME = 52  # characters
ROW, BAR = 22, 12
DOT = 5  # width of a mark of a step
RIDGE = 40  # height of one histogram
MAX_MARKS = 1500  # of one plot; above, only the worst tensor of each layer is drawn
MAX_ROWS = 40  # of one plot
MAX_NAMED = 5  # dots of one plot with a name beside them, the worst


@dataclass(frozen=True)
class Line:
    """`kind`: "axis" or "gate"."""

    x1: float
    y1: float
    x2: float
    y2: float
    kind: str = "axis"


@dataclass(frozen=True)
class Path:
    """A line through points (x, y), with a text."""

    points: Sequence[tuple[float, float]]
    text: str
    kind: str = "ok"


@dataclass(frozen=True)
class Plot:
    """`about` describes the marks in words; `key` explains their kinds. `paths` lie under the marks."""

    title: str
    about: str
    height: int
    lines: Sequence[Line]
    words: Sequence[Word]
    marks: Sequence[Mark]
    key: Sequence[tuple[str, str]] = ()
    width: int = WIDTH
    paths: Sequence[Path] = ()


def parity_plots(parity: Parity) -> list[Plot]:
    """SQNR and cosine of each weight by layer, and the output error of each module."""
    plots = []
    least = sorted({t.gate for t in parity.tensors if 0 < t.gate < 1})
    gates = {f"gate {gate:g}": math.log10(1 - gate) for gate in least}
    if parity.tensors:
        plots += [
            _by_layer("Signal to noise of each weight, dB: higher is better", parity.tensors, lambda t: t.decibels),
            _by_layer(
                "Direction of each weight, log10(1 - cosine): lower is better", parity.tensors, _direction, gates
            ),
        ]
    if parity.layers:
        plots.append(_output_errors(parity.layers))
    return plots


def _direction(t: TensorParity) -> float:
    return math.log10(1 - t.cosine) if t.cosine < 1 else -math.inf


def _by_layer(
    title: str,
    tensors: Sequence[TensorParity],
    measure: Callable[[TensorParity], float],
    gates: Mapping[str, float] = MappingProxyType({}),
) -> Plot:
    """One dot per weight (the worst of the experts) over its layer; weights outside layers come last.

    The worst have their role's name beside them. `gates`: text -> value of a line.
    """
    shown = [worst(group) for group in grouped(tensors, lambda t: (layer_of(t.name), pattern(t.name)))]
    if len(shown) > MAX_MARKS:
        shown = [worst(group) for group in grouped(shown, lambda t: layer_of(t.name))]
    values = [measure(t) for t in shown]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    axis, layers = Axis.over([*finite, *gates.values()]), Layers.of(shown)
    turns, marks = Counter[int | None](), []
    places: dict[int, tuple[float, float]] = {}
    for t, value in zip(shown, values, strict=True):
        layer = layer_of(t.name)
        places[id(t)] = x, y = layers.x(layer, turns[layer]), axis.y(value)
        marks.append(_dot(t, value, x, y))
        turns[layer] += 1
    named = sorted(shown, key=lambda t: (t.passed, t.sqnr))[:MAX_NAMED]
    wanted: list[tuple[str, list[tuple[float, float]]]] = [
        (text, [(WIDTH - 40, axis.y(at) - 5), (LEFT + 40, axis.y(at) - 5)]) for text, at in gates.items()
    ]
    wanted += [(role(t.name), around(role(t.name), *places[id(t)])) for t in named]
    names = beside(wanted, marks, (LEFT, 0, WIDTH, HEIGHT - BOTTOM))
    failed = sum(not t.passed for t in tensors)
    about = f"{len(shown):,} of {len(tensors):,} weights, from {min(finite):.2f} to {max(finite):.2f}; {failed} failed."
    key = [("ok", "passed"), ("low", "failed")] if failed else []
    lines = [*axis.lines(), *(Line(LEFT, axis.y(value), WIDTH, axis.y(value), "gate") for value in gates.values())]
    return Plot(title, about, HEIGHT, lines, [*axis.words(), *layers.words(), *names], marks, key)


def role(name: str) -> str:
    """The part of a weight's name that says what it is: `layers.3.self_attn.q_proj.weight` -> `self_attn.q_proj`."""
    parts = name.rpartition(": ")[2].removesuffix(".weight").split(".")
    after = max((at for at, part in enumerate(parts) if part.isdecimal()), default=-1)
    return short(".".join(parts[after + 1 :][-2:]))


def _dot(t: TensorParity, value: float, x: float, y: float) -> Mark:
    """A disc; a larger square if a gate failed."""
    side = 7 if t.passed else 9
    text = f"{t.name}: {measured(value, t)}" + ("" if t.passed else ", FAILED")
    kind, rounding = ("ok", 4) if t.passed else ("low", 0)
    return Mark(x - side / 2, y - side / 2, side, side, text, kind, rounding)


def measured(value: float, t: TensorParity, digits: int = 2) -> str:
    """A measure of a weight; in words if it is not finite."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "nothing lost" if t.decibels > 0 else "nothing left"


@dataclass(frozen=True)
class Layers:
    """A horizontal axis with a column for each layer, and one more (None) for tensors outside layers."""

    columns: Sequence[int | None]
    crowded: bool  # the dots of one layer are drawn side by side

    @classmethod
    def of(cls, tensors: Sequence[TensorParity]) -> Layers:
        layers = {layer_of(t.name) for t in tensors}
        columns = [*sorted(layer for layer in layers if layer is not None), *([None] if None in layers else [])]
        return cls(columns, len(tensors) > len(columns))

    @property
    def step(self) -> float:
        return (WIDTH - LEFT - 8) / len(self.columns)

    def x(self, layer: int | None, turn: int = 0) -> float:
        shift = min(self.step * 0.8, 90.0) / 8 * (turn % 8 - 3.5) if self.crowded else 0.0
        return LEFT + self.step * (self.columns.index(layer) + 0.5) + shift

    def words(self) -> list[Word]:
        every = max(len(self.columns) // 16, 1)
        words = [
            Word(LEFT + self.step * (i + 0.5), HEIGHT - BOTTOM + 16, str(layer), "middle")
            for i, layer in enumerate(self.columns)
            if layer is not None and i % every == 0
        ]
        if None in self.columns:
            words.append(Word(WIDTH - 8, HEIGHT - BOTTOM + 16, "other"))
        return [*words, Word((LEFT + WIDTH) / 2, HEIGHT - 8, "layer", "middle")]


@dataclass(frozen=True)
class Axis:
    """A vertical axis from `low` at the bottom to `high` on top; values outside are drawn at its ends."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Axis:
        """From the integer below the smallest value to the integer above the largest."""
        low = math.floor(min(values))
        return cls(low, max(math.ceil(max(values)), low + 1))

    def y(self, value: float) -> float:
        bottom = HEIGHT - BOTTOM
        value = min(max(value, self.low), self.high)
        return bottom - (value - self.low) / (self.high - self.low) * (bottom - TOP)

    def ticks(self) -> list[float]:
        return [self.low + (self.high - self.low) * k / 4 for k in range(5)]

    def lines(self) -> list[Line]:
        return [Line(LEFT, self.y(tick), WIDTH, self.y(tick)) for tick in self.ticks()]

    def words(self) -> list[Word]:
        return [Word(LEFT - 8, self.y(tick) + 4, f"{tick:g}") for tick in self.ticks()]


def _output_errors(values: Sequence[tuple[str, float]]) -> Plot:
    """One bar per module, the worst on top."""
    shown = values[:MAX_ROWS]
    largest = max((value for _, value in shown if math.isfinite(value)), default=0.0) or 1.0
    words, marks = [], []
    for n, (name, value) in enumerate(shown):
        width = min(value, largest) / largest * (WIDTH - LABEL - 80) if math.isfinite(value) else 0.0
        words += [
            Word(LABEL - 8, n * ROW + 15, short(name)),
            Word(LABEL + width + 6, n * ROW + 15, f"{value:.2e}", "start"),
        ]
        marks.append(Mark(LABEL, n * ROW + 5, width, BAR, f"{name}: {value:.2e}"))
    about = f"The {len(shown)} of {len(values):,} modules with the largest error, from {largest:.2e}."
    title = "Error that quantizing each module adds to its own output, relative L2"
    return Plot(title, about, len(shown) * ROW + 8, [], words, marks)


def storage_plot(rows: Sequence[Storage]) -> Plot | None:
    """Two bars per kind of tensor: its bytes before, and those of its codes and scales."""
    shown = sorted(rows, key=lambda row: -row.before - row.codes - row.scales)[:MAX_ROWS]
    largest = max((max(row.before, row.codes + row.scales) for row in shown), default=0)
    if not largest:
        return None
    unit, words, marks = (WIDTH - LABEL - 130) / largest, [], []
    for n, row in enumerate(shown):
        y = n * (ROW + 12) + 4
        after = row.codes + row.scales
        words.append(Word(LABEL - 8, y + 17, short(row.kind)))
        right = LABEL + max(row.before, after) * unit + 6
        words.append(Word(right, y + 17, f"{size(row.before)} → {size(after)}", "start"))
        marks.append(Mark(LABEL, y, row.before * unit, 11, f"{row.kind}: {size(row.before)} before", "was"))
        text = f"{row.kind}: {size(row.codes)} of codes or values"
        marks.append(Mark(LABEL, y + 13, row.codes * unit, 11, text))
        text = f"{row.kind}: {size(row.scales)} of scales"
        marks.append(Mark(LABEL + row.codes * unit, y + 13, row.scales * unit, 11, text, "more"))
    before, after = sum(row.before for row in rows), sum(row.codes + row.scales for row in rows)
    about = (
        f"{size(before)} in the source, {size(after)} written, by kind of tensor; the {len(shown)} largest are drawn."
    )
    key = [("was", "source"), ("ok", "written: codes or values"), ("more", "written: scales")]
    return Plot("Bytes by kind of tensor, before and after", about, len(shown) * (ROW + 12) + 8, [], words, marks, key)


@dataclass(frozen=True)
class Bar:
    """One bar of a row: its column, the count that sets its height, and its text."""

    column: int
    count: int
    text: str
    kind: str = "ok"


def scales_plot(ranges: Sequence[ScaleRange]) -> Plot | None:
    """One histogram per kind of tensor over powers of two."""
    if not ranges:
        return None
    shown = ranges[:MAX_ROWS]
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
    """Tokens of each expert, one row per layer. If there are too many layers: those with the least covered experts."""
    experts = max((len(layer.tokens) for layer in layers), default=0)
    if not experts:
        return None
    limit = min(max(MAX_MARKS // experts, 1), MAX_ROWS)
    shown = sorted(layers, key=lambda layer: min(layer.tokens))[:limit]
    rows = [
        (layer.module, [_expert_bar(layer.module, expert, count) for expert, count in enumerate(layer.tokens)])
        for layer in layers
        if layer in shown
    ]
    ticks = {expert + 0.5: str(expert) for expert in range(0, experts, max(experts // 16, 1))}
    unseen = sum(len(layer.unseen) for layer in layers)
    about = (
        f"{len(rows)} of {len(layers)} layers, {experts} experts each; heights are logarithmic. "
        f"{unseen} experts got no token."
    )
    key = [("ok", "tokens"), ("low", "never seen")] if unseen else []
    return _rows_of_bars("Calibration tokens by expert", about, rows, experts, ticks, key)


def _expert_bar(module: str, expert: int, count: int) -> Bar:
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
    """Bars of logarithmic height over common columns; a count of zero gets a short bar, so that it is visible."""
    step, words, marks, lines = (WIDTH - LABEL - 16) / columns, [], [], []
    for n, (name, bars) in enumerate(rows):
        bottom = (n + 1) * RIDGE
        lines.append(Line(LABEL, bottom, WIDTH - 8, bottom))
        words.append(Word(LABEL - 8, bottom - 4, short(name)))
        largest = max(bar.count for bar in bars)
        for bar in bars:
            height = (RIDGE - 8) * math.log1p(bar.count) / math.log1p(largest) if bar.count else 5.0
            left, width = LABEL + bar.column * step + 0.5, max(step - 1, 1.0)
            marks.append(Mark(left, bottom - height, width, height, bar.text, bar.kind))
    below = len(rows) * RIDGE + 18
    words += [Word(LABEL + at * step, below, text, "middle") for at, text in ticks.items()]
    return Plot(title, about, below + 10, lines, words, marks, key)


def short(name: str) -> str:
    """A name, or the end of it if it is too long."""
    return name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}"


def training_plot(distillation: Distillation) -> Plot | None:
    """Training losses and held-out KL by step, on a logarithmic scale; None without a loss above zero."""
    losses = [(step, loss) for step, loss in distillation.losses if loss > 0]
    every = max(1, -(-len(losses) // MAX_MARKS))
    shown, held_out = losses[::every], [(step, kl) for step, kl, _ in distillation.held_out if kl > 0]
    values = [math.log10(value) for _, value in (*shown, *held_out)]
    if not values:
        return None
    axis = Axis.over(values)
    bottom = HEIGHT - BOTTOM

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 12) * step / max(distillation.steps, 1)

    def dots(rows: Iterable[tuple[int, float]], kind: str, what: str) -> list[Mark]:
        return [
            Mark(x(step) - DOT / 2, y - DOT / 2, DOT, DOT, f"step {step}: {what} {value:.4g}", kind, DOT)
            for step, value in rows
            for y in [axis.y(math.log10(value))]
        ]

    words = [Word(LEFT - 8, axis.y(tick) + 4, f"{10**tick:.2g}") for tick in axis.ticks()]
    words += [Word(x(step), bottom + 18, f"{step:,}", "middle") for step in _step_ticks(distillation.steps)]
    first, last = (f"{rows[at][1]:.4g}" for rows, at in ((losses or held_out, 0), (losses or held_out, -1)))
    return Plot(
        "Loss by step",
        f"The training loss goes from {first} to {last} in {distillation.steps:,} steps; the scale is logarithmic.",
        HEIGHT,
        axis.lines(),
        words,
        [*dots(shown, "was", "loss"), *dots(held_out, "ok", "KL on text held out")],
        key=(("was", "loss of a step, with that of hidden states"), ("ok", "KL to the teacher on text held out")),
    )


def _step_ticks(steps: int) -> list[int]:
    return sorted({round(steps * part / 4) for part in range(5)})
