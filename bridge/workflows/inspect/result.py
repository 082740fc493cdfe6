"""`Inspection`: what was seen, its tables, and the recipe that follows."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from bridge.core.display import Displayed, Table
from bridge.core.errors import UsageError
from bridge.core.text import nearest, size
from bridge.quant.schemes.catalog import scheme_names
from bridge.workflows.inspect.routes import ALIASES, COLUMNWISE, QUANT_STATS
from bridge.workflows.inspect.side_by_side import Compared, Difference

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridge.tracker.cost import Cost
    from bridge.tracker.finite import NotFinite

SCHEMA = 1
MARK = "inspect.json"  # in every inspection: it tells one from other directories
BELOW = 18.0  # dB: an eighth of the tensor's norm is noise
RISING = ("sqnr", "cosine", "min")  # the lower, the worse; other statistics, the higher
COMPARED = ("module", "alone", "accumulated", "norm ratio")
COLUMNS = ("step", "layer", "role", "tensor", "statistic", "value")
COSTS = ("module", "calls", "own ms", "forward ms", "backward ms", "kept for backward")


@dataclass(frozen=True)
class Record:
    """One value of one tensor. `step` counts from 0; `value` is None where it is not finite; 200 dB lose nothing."""

    step: int
    layer: str
    role: str
    tensor: str
    stat: str
    value: float | None


@dataclass(frozen=True)
class CodeRange:
    """The magnitudes of a tensor that the codes of a scheme reach.

    Below `zero_below` all become zero, from `kept_from` on none: half the least code times the least and the largest
    scale. What is above `cut_above` gets the largest code; None where the scale is that of the tensor itself.
    """

    scheme: str
    zero_below: float
    kept_from: float
    cut_above: float | None = None


@dataclass(frozen=True)
class Magnitudes:
    """How many values of a tensor lie from a power of two up to the next: (power, count), and how many are zero.

    `ranges`: those of the schemes that were asked for, without those whose blocks have a least value each (ggml's).
    """

    step: int
    layer: str
    tensor: str
    counts: tuple[tuple[int, int], ...]
    zeros: int
    ranges: tuple[CodeRange, ...] = ()


@dataclass(frozen=True, repr=False)
class Inspection(Displayed):
    """What an inspection saw.

    `about`: the model, the scheme, versions and the digest of the config. `records`: in the order of steps and layers.
    `compared`: modules beside those of the source, with `against=`. `notes`: what was not seen, and why. `modules`: the
    layers, in the model's order. `magnitudes`: where the config asks for `histogram`, as the default one does.
    `first_bad`: the module that made the first NaN or infinity, with `nan=True`. `costs`: time and kept bytes of each
    module over all batches, with `cost=True`. `dumps`: files of tensors, in the directory that was written. `noted`:
    of each note about layers, the names of all of them.
    """

    about: Mapping[str, str]
    records: tuple[Record, ...] = ()
    compared: tuple[Compared, ...] = ()
    notes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    magnitudes: tuple[Magnitudes, ...] = ()
    first_bad: NotFinite | None = None
    costs: tuple[Cost, ...] = ()
    dumps: tuple[str, ...] = ()
    noted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """False where a NaN or an infinity was seen; `qbridge inspect` then exits with 3."""
        return self.first_bad is None and not any(map(is_bad, self.records))

    def costliest(self, n: int = 10) -> list[Cost]:
        """The `n` modules with the largest own time, the largest first; with `cost=True` only."""
        return sorted(self.costs, key=lambda cost: (-cost.own, cost.module))[:n]

    def worst(self, stat: str = "sqnr", n: int = 10, tensor: str | None = None) -> list[Record]:
        """The `n` layers and tensors with the worst value of a statistic, the worst first.

        `stat`: as in the records, or without its scheme: "sqnr" takes "fp8_sqnr" and "int8_sqnr", too. The worst is the
        lowest SQNR, cosine and minimum, and the highest of others; values that are not finite come first.
        """
        worst: dict[tuple[str, str, str], Record] = {}
        rising = base_of(stat) in RISING
        for record in self._of(stat):
            key = (record.layer, record.tensor, record.stat)
            if tensor not in (None, record.tensor):
                continue
            if key not in worst or badness(record, rising) > badness(worst[key], rising):
                worst[key] = record
        return sorted(worst.values(), key=lambda record: -badness(record, rising))[:n]

    def table(self, stat: str | None = None, tensor: str | None = None, n: int = 10) -> Table:
        """Columns and rows of one statistic, a row a layer and a column a step.

        Without one, the worst SQNRs: `n` in all, as many of each scheme and at least one; without any SQNR, the first
        `n` records.
        """
        if stat is None and self.compared and not self.records:
            return COMPARED, [_cells(row) for row in self.most_alone(len(self.compared))]
        if stat is None:
            found = self._worst_by_scheme(n) or list(self.records[:n])
            return COLUMNS, [(str(r.step), r.layer, r.role, r.tensor, r.stat, _value(r.value)) for r in found]
        rows: dict[tuple[str, str, str], dict[int, float | None]] = {}
        for record in self._of(stat):
            if tensor in (None, record.tensor):
                rows.setdefault((record.layer, record.tensor, record.stat), {})[record.step] = record.value
        steps = sorted({step for values in rows.values() for step in values})
        columns = ("layer", "tensor", "statistic", *(f"step {step}" for step in steps))
        return columns, [
            (*key, *(_value(values[step]) if step in values else "" for step in steps)) for key, values in rows.items()
        ]

    def recipe(self, stat: str = "sqnr", below: float = BELOW, base: str | None = None) -> str:
        """A recipe that keeps the layers whose statistic is below a value at any step.

        `stat` names its scheme, "int8_sqnr", which is `base` unless that is given. It tells where numbers are lost, not
        what that costs: `qbridge sensitivity` measures it.

        Raises:
            UsageError: no layer has that statistic, or no scheme follows from its name.
        """
        if base_of(stat) not in RISING:
            raise UsageError(f"recipe(stat={stat!r}): keeps layers below a value; name one of {', '.join(RISING[:2])}")
        found = [record for record in self._of(stat) if record.tensor in ("activation", "weight")]
        named = {record.stat.rpartition(f"_{base_of(stat)}")[0] for record in found} - {""}
        schemes = named or {self.about.get("scheme", "")}
        if base is None and (len(schemes) != 1 or not schemes <= {*scheme_names()}):
            raise UsageError(f"recipe(stat={stat!r}): it starts from no single scheme; say base=, the name of a scheme")
        chosen = sorted({r.layer for r in found if r.value is None or r.value < below}, key=self._place)
        rule = ""
        if chosen:
            names = "".join(f"    {json.dumps(name)},\n" for name in chosen)
            rule = f'\n[[rule]]\nmodules = [\n{names}]\nquant = "none"\n'
        told = f"# layers with {stat} below {below:g} at any step: noise, not what it costs (qbridge sensitivity)\n"
        return f"{told}base = {json.dumps(base or schemes.pop())}\n{rule}"

    def lines(self) -> list[str]:
        text = []
        if self.records:
            layers, stats = {record.layer for record in self.records}, {record.stat for record in self.records}
            steps = {record.step for record in self.records}
            text += [
                f"{len(self.records):,} values: {len(layers):,} layers, {len(stats)} statistics, {len(steps)} steps"
            ]
        if self.compared:
            loudest = min(self.compared, key=lambda row: row.accumulated.decibels)
            text += [
                f"{len(self.compared):,} modules compared; the largest error is that of {loudest.module}, "
                f"{decibels_text(loudest.accumulated)}"
            ]
        if self.first_bad:
            text += [f"first not finite: {self.first_bad}"]
        elif bad := next(filter(is_bad, self.records), None):
            value = f"{bad.stat} = {_value(bad.value)}"
            text += [
                f"not finite: {bad.tensor} of {bad.layer} at step {bad.step} ({value}) is the first; nan=True (--nan) "
                "names the module that makes it"
            ]
        return [*text, *self.notes]

    def most_alone(self, n: int = 10) -> list[Compared]:
        """The `n` matrices whose own error is largest, the largest first; with `against=` only."""
        alone = [row for row in self.compared if row.alone]
        return sorted(alone, key=lambda row: (row.alone.decibels if row.alone else 0.0, row.module))[:n]

    def to_json(self) -> str:
        """Everything, with `indent=1`; equal inspections give equal texts."""
        told = {
            "schema": SCHEMA, "about": dict(sorted(self.about.items())), "modules": list(self.modules),
            "records": [asdict(record) for record in self.records], "compared": [_plain(row) for row in self.compared],
            "magnitudes": [{**asdict(row), "counts": dict(row.counts)} for row in self.magnitudes],
            "first_bad": asdict(self.first_bad) if self.first_bad else None,
            "costs": [asdict(cost) for cost in self.costs], "notes": list(self.notes), "dumps": list(self.dumps),
            "noted": {what: list(layers) for what, layers in self.noted.items()},
        }  # fmt: skip
        return json.dumps(told, indent=1, allow_nan=False)

    def to_csv(self) -> str:
        """The records, a line a value; empty where it is not finite."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for r in self.records:
            writer.writerow((r.step, r.layer, r.role, r.tensor, r.stat, "" if r.value is None else repr(r.value)))
        return text.getvalue()

    def _worst_by_scheme(self, n: int) -> list[Record]:
        """The worst SQNRs, as many of each statistic that is one, the worst first; none where no config asks for it."""
        stats = dict.fromkeys(record.stat for record in self.records if base_of(record.stat) == "sqnr")
        found = self.worst(n=len(self.records)) if stats else []
        each = max(1, n // max(1, len(stats)))
        return [record for stat in stats for record in [r for r in found if r.stat == stat][:each]]

    def _of(self, stat: str) -> Iterable[Record]:
        """The records of a statistic, under any scheme if it names none; UsageError if there are none."""
        under_any = stat in (*QUANT_STATS, *ALIASES)
        found = [r for r in self.records if r.stat == stat or (under_any and base_of(r.stat) == stat)]
        if not found:
            known = sorted({record.stat for record in self.records})
            raise UsageError(f"stat={stat!r}: was not inspected; {nearest(stat, known)}")
        return found

    def _place(self, layer: str) -> int:
        return self.modules.index(layer) if layer in self.modules else len(self.modules)


def base_of(stat: str) -> str:
    """A statistic without its scheme; those of the transpose keep their end, and others stay as they are."""
    written = f"_{stat.removesuffix(COLUMNWISE)}"
    names = [name for name in (*QUANT_STATS, *ALIASES) if written.endswith(f"_{name}")]
    return max(names, key=len) + COLUMNWISE * stat.endswith(COLUMNWISE) if names else stat


def badness(record: Record, rising: bool) -> float:
    """The larger, the worse; infinite where the value is not finite."""
    if record.value is None:
        return math.inf
    return -record.value if rising else record.value


def is_bad(record: Record) -> bool:
    """Whether a record counts a NaN or an infinity in its tensor."""
    if record.stat in ("nan%", "inf%"):
        return bool(record.value)
    if record.value is not None:
        return False
    name = base_of(record.stat).removesuffix(COLUMNWISE)
    return name in ("cur_amax", "max", "min") or (name in QUANT_STATS and not name.startswith("scale_"))


def inspection_table(seen: Inspection, worst: int, out: str | None) -> RenderableType:
    """The matrices with the largest errors of their own, the figures of all, and where the page is."""
    from rich.console import Group

    from bridge.reporting.columns import Columns, line

    table: list[RenderableType] = []
    if seen.compared:
        table = [Columns(COMPARED, [_cells(row) for row in seen.most_alone(worst)], right=(1, 2, 3)), ""]
    elif seen.records:
        columns, rows = seen.table(n=worst)
        what = "worst SQNRs, as many of each scheme" if rows[0][4].endswith("sqnr") else "first values (no SQNR)"
        shown = f"shown: {len(rows):,} of {len(seen.records):,}, the {what}; more: --worst N, all: --out DIR or --json"
        table = [Columns(columns, rows, right=(0, 5)), "", shown]
    if seen.costs:
        table += [
            Columns(COSTS, [cost_cells(cost, seen.costs) for cost in seen.costliest(worst)], right=range(1, 6)),
            "",
        ]
    return Group(*table, *seen.lines(), *([line("page", f"{out}/inspect.html")] if out else []))


def decibels_text(found: Difference | None) -> str:
    """A signal-to-noise ratio in words."""
    if found is None:
        return ""
    return "equal" if found.sqnr is None else f"{found.sqnr:.1f} dB" if math.isfinite(found.sqnr) else "nothing left"


def batches_of(costs: Sequence[Cost]) -> int:
    """How often the model itself was called: the module with the most seconds."""
    return max(max(costs, key=lambda cost: cost.forward).calls, 1)


def cost_cells(cost: Cost, costs: Sequence[Cost]) -> tuple[str, ...]:
    """A cost by batch."""
    batches = batches_of(costs)
    times = (f"{1000 * seconds / batches:.2f}" for seconds in (cost.own, cost.forward, cost.backward))
    return cost.module, f"{cost.calls:,}", *times, size(cost.kept // batches) if cost.kept else ""


def _cells(row: Compared) -> tuple[str, ...]:
    ratio = row.alone.norm_ratio if row.alone else row.accumulated.norm_ratio
    return row.module, decibels_text(row.alone), decibels_text(row.accumulated), f"{ratio:.4f}"


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _plain(row: Compared) -> dict[str, object]:
    told = asdict(row)
    for name in ("accumulated", "alone"):
        found = getattr(row, name)
        if found is not None:
            values = asdict(found).items()
            told[name] = {key: value if math.isfinite(value or 0.0) else None for key, value in values}
            told[name]["equal"] = found.sqnr is None
    return told
