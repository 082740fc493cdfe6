"""Says of every tensor of a plan how it was made and which rows of tables it came from; reads no weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from bridge.golden.values import Key, Origin
from bridge.planning import Output, Plan, Step
from bridge.show import pattern
from bridge.tables.arch import load_arch
from bridge.tables.dialect import dialect_names, load_dialect
from bridge.tables.files import Place
from bridge.tables.grammar import roles_in
from bridge.verification import format_name

_INDEX = re.compile(r"\{\w+\}")
_SLAB = re.compile(r"\[\d+\]\.\d+(?=\.)")  # a layer of a stacked tensor, as plans name it: layers[22].3.mlp


def origins_of(plan: Plan) -> dict[Key, Origin]:
    """File and name of every planned tensor -> how it came to be."""
    rows = _Rows(plan)
    found: dict[Key, Origin] = {}
    known: dict[Origin, Origin] = {}  # a layer's origins are those of the layer before
    for step in plan.steps:
        formatted, of = format_name(step.format) if step.format else "", rows.of(step)
        for output in step.outputs:
            made = Origin(_alike(output.spec.name), output.part, formatted, _alike(output.expression), of)
            found[output.key] = known.setdefault(made, made)
    return found


def _alike(text: str) -> str:
    """`text` with {} for the number of a layer, an expert."""
    return pattern(_SLAB.sub(".{}", text))


class _Rows:
    """Rows by the names that they stand for."""

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
        """The target's row first, then the architecture's, then those that another dialect's checkpoint is read by."""
        names = [_alike(part.source) for part in step.inputs if part.source]
        spelled = [spelling for name in names for spelling in (name, self._prefix + name)]
        sources = [self._arch[name] for name in spelled if name in self._arch]
        foreign = [
            text for row in sources if row.expr for role in roles_in(row.expr) for text in self._read.get(role, ())
        ]
        return tuple(dict.fromkeys((*self._written(step), *(_text(row.place) for row in sources), *foreign)))


def _read_rows(plan: Plan) -> dict[str, list[str]]:
    """Role -> the rows of the source's dialect that a checkpoint may say it by."""
    dialect, found = load_dialect(plan.dialect), dict[str, list[str]]()
    for row in dialect.rows:
        if row.only in ("", dialect.architectures.get(plan.architecture, "")):
            for role in row.roles:
                found.setdefault(role, []).append(_text(row.place))
    return found


def _written_rows(plan: Plan) -> Callable[[Step], Iterator[str]]:
    dialect = load_dialect(plan.target)
    word = dialect.architectures.get(plan.architecture, "")
    rows: dict[str, list[tuple[str, str]]] = {}
    for row in dialect.rows:
        if row.written and row.only in ("", word):
            rows.setdefault(_INDEX.sub("{}", row.name), []).append((str(row.expr), _text(row.place)))

    def find(step: Step) -> Iterator[str]:
        output: Output | None = next((output for output in step.outputs if output.part == "weight"), None)
        found = rows.get(_alike(output.spec.name), []) if output else []
        exact = [text for expression, text in found if output and expression in output.expression]
        yield from exact or [text for _, text in found]

    return find


def _text(place: Place) -> str:
    """File and row, without the line, which moves when another row does."""
    row = re.split(r"\s+#", place.row)[0]
    return f"{place.file}: {' '.join(row.split())}"
