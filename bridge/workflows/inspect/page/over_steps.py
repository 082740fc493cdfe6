"""Lines of statistics over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bridge.core.text import layer_of
from bridge.reporting.page import Section
from bridge.reporting.plots import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Axis, Line, Mark, Path, Plot, Word
from bridge.workflows.inspect.result import Inspection, Record

STATISTICS = 4  # plots
LINES = 4  # of one plot, each with its name at its end
POINTS = 24  # of one line
RIGHT = 250  # width of the names
NAME = 38  # characters
APART = 15  # between two names
KINDS = ("ok", "more", "low", "was")
Tensor = tuple[str, str]  # layer and tensor


def over_steps(inspection: Inspection) -> Section:
    """The statistics that moved most, of the tensors that moved most; nothing if each was taken once."""
    by_stat: dict[str, dict[Tensor, list[Record]]] = {}
    for record in inspection.records:
        if record.value is not None:
            by_stat.setdefault(record.stat, {}).setdefault((record.layer, record.tensor), []).append(record)
    rows = {
        stat: {key: found for key, found in tensors.items() if len(found) > 1 and _moved(found)}
        for stat, tensors in by_stat.items()
    }
    most = sorted((stat for stat in rows if rows[stat]), key=lambda stat: -max(map(_moved, rows[stat].values())))
    kept = {*most[:STATISTICS]}
    return Section("steps", "Over steps", plots=[_plot(stat, rows[stat]) for stat in rows if stat in kept])


def _moved(found: Sequence[Record]) -> float:
    values = [record.value or 0.0 for record in found]
    least = 1.0 if found[0].stat.endswith("%") else 1e-30  # below 1 % nothing moves
    return (max(values) - min(values)) / max(*map(abs, values), least)


def _plot(stat: str, tensors: Mapping[Tensor, Sequence[Record]]) -> Plot:
    shown = sorted(tensors.items(), key=lambda row: (-_moved(row[1]), row[0]))[:LINES]
    records = [record for _, found in shown for record in found]
    axis = _Fine.over([record.value or 0.0 for record in records])
    first, last = min(record.step for record in records), max(record.step for record in records)
    width = WIDTH - LEFT - RIGHT

    def x(step: int) -> float:
        return LEFT + 6 + (width - 12) * (step - first) / max(last - first, 1)

    marks, paths, ends = list[Mark](), list[Path](), list[tuple[float, str]]()
    for (key, found), kind in zip(shown, KINDS, strict=False):
        points = found[:: -(-len(found) // POINTS)]
        points = points if points[-1] is found[-1] else [*points, found[-1]]
        places = tuple((x(record.step), axis.y(record.value or 0.0)) for record in points)
        name = _name(key, found[0].role)
        paths.append(Path(places, name, kind))
        marks += [
            Mark(at - 3, y - 3, 6, 6, f"step {record.step}: {record.value:.4g}, {name}", kind, 3)
            for (at, y), record in zip(places, points, strict=True)
        ]
        ends.append((places[-1][1], name))
    lines = [Line(LEFT, line.y1, WIDTH - RIGHT, line.y2) for line in axis.lines()]
    words = [*axis.words(), *_names(ends)]
    words += [Word(x(first), HEIGHT - 24, f"step {first:,}", "start"), Word(x(last), HEIGHT - 24, f"step {last:,}")]
    about = f"The {len(shown)} of {len(tensors):,} tensors that moved most."
    return Plot(stat, about, HEIGHT - 10, lines, words, marks, paths=paths)


def _name(key: Tensor, role: str) -> str:
    layer = layer_of(key[0])
    return f"{key[1]}, {role}, layer {layer}" if role and layer is not None else f"{key[1]}, {key[0]}"


def _names(ends: Sequence[tuple[float, str]]) -> list[Word]:
    """The names of lines beside their ends, moved apart where two would meet."""
    words, last = list[Word](), float(HEIGHT - BOTTOM + 4)
    for left, (y, name) in reversed([*enumerate(sorted(ends))]):
        last = max(min(y + 4, last), TOP + left * APART)
        words.append(Word(WIDTH - RIGHT + 8, last, name if len(name) <= NAME else f"…{name[1 - NAME :]}", "start"))
        last -= APART
    return words


class _Fine(Axis):
    """An axis whose ends are those of the values, which may lie between two whole numbers."""

    @classmethod
    def over(cls, values: Sequence[float]) -> _Fine:
        low, high = min(values), max(values)
        return cls(low, high if high > low else low + 1)

    def words(self) -> list[Word]:
        texts = ((tick, f"{tick:.3g}") for tick in self.ticks())
        return [Word(LEFT - 8, self.y(at) + 4, text if len(text) < 8 else f"{at:.1e}") for at, text in texts]
