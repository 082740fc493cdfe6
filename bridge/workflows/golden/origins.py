"""How each tensor of a plan is made, from which table rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from bridge.core.mappings import Place
from bridge.core.text import pattern
from bridge.planning.plan import Output, Plan, Step
from bridge.quant.describe import format_name
from bridge.tables.architectures.arch import load_arch
from bridge.tables.dialects.dialect import dialect_names, load_dialect
from bridge.tables.expressions.grammar import roles_in
from bridge.workflows.golden.values import Key, Origin

_INDEX = re.compile(r"\{\w+\}")
_SLAB = re.compile(r"\[\d+\]\.\d+(?=\.)")  # a layer of a stacked tensor, as in the plan's layers[22].3.mlp


def origins_of(plan: Plan) -> dict[Key, Origin]:
    """File and name of every planned tensor -> its origin."""
    rows = _Rows(plan)
    origins: dict[Key, Origin] = {}
    known: dict[Origin, Origin] = {}  # layers share their origins
    for step in plan.steps:
        weight_format, from_rows = format_name(step.format) if step.format else "", rows.of(step)
        for output in step.outputs:
            name, made = _pattern(output.spec.name), _pattern(output.expression)
            origin = Origin(name, output.part, weight_format, made, from_rows)
            origins[output.key] = known.setdefault(origin, origin)
    return origins


def _pattern(text: str) -> str:
    """`text` with {} for the numbers of layers and experts."""
    return pattern(_SLAB.sub(".{}", text))


class _Rows:
    """The table rows of a plan, by tensor name."""

    def __init__(self, plan: Plan) -> None:
        arch = load_arch(plan.architecture)
        self._prefix = arch.prefix if arch else ""
        own = [row for row in arch.rows if plan.architecture in (row.only or (plan.architecture,))] if arch else []
        self._arch = {_INDEX.sub("{}", row.name): row for row in own}
        self._written: Callable[[Step], Iterable[str]] = lambda step: ()
        if plan.target in dialect_names():
            self._written = _written_rows(plan)
        self._read = _read_rows(plan) if plan.dialect in dialect_names() else {}

    def of(self, step: Step) -> tuple[str, ...]:
        """The target's row first, then the architecture's, then the rows that read the source's dialect."""
        names = [_pattern(part.source) for part in step.inputs if part.source]
        spelled = [spelling for name in names for spelling in (name, self._prefix + name)]
        sources = [self._arch[name] for name in spelled if name in self._arch]
        foreign = [
            text for row in sources if row.expr for role in roles_in(row.expr) for text in self._read.get(role, ())
        ]
        return tuple(dict.fromkeys((*self._written(step), *(_text(row.place) for row in sources), *foreign)))


def _read_rows(plan: Plan) -> dict[str, list[str]]:
    """Role -> the rows of the source's dialect that contain it."""
    dialect, rows = load_dialect(plan.dialect), dict[str, list[str]]()
    for row in dialect.rows:
        if row.only in ("", dialect.architectures.get(plan.architecture, "")):
            for role in row.roles:
                rows.setdefault(role, []).append(_text(row.place))
    return rows


def _written_rows(plan: Plan) -> Callable[[Step], Iterator[str]]:
    dialect = load_dialect(plan.target)
    word = dialect.architectures.get(plan.architecture, "")
    rows: dict[str, list[tuple[str, str]]] = {}
    for row in dialect.rows:
        if row.written and row.only in ("", word):
            rows.setdefault(_INDEX.sub("{}", row.name), []).append((str(row.expr), _text(row.place)))

    def find(step: Step) -> Iterator[str]:
        output: Output | None = next((output for output in step.outputs if output.part == "weight"), None)
        named = rows.get(_pattern(output.spec.name), []) if output else []
        exact = [text for expression, text in named if output and expression in output.expression]
        yield from exact or [text for _, text in named]

    return find


def _text(place: Place) -> str:
    """File and row, without the line number, which changes with other rows."""
    row = re.split(r"\s+#", place.row)[0]
    return f"{place.file}: {' '.join(row.split())}"
