"""Derive a model's terms from the names and shapes of its tensors.

An axis of a tensor is a formula over terms (`(heads + 2 * kv_heads) * head_dim`). One unknown in it is solved for;
with none, the formula is a check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bridge.core.mappings import Place
from bridge.core.values import TensorSpec
from bridge.sources.configs.facts import Fact, Facts, listing, shown
from bridge.sources.configs.kinds import mistyped
from bridge.tables.expressions.grammar import Formula, parse_formula

_PLACE = Place("bridge/sources/configs", 1, "")


@dataclass(frozen=True)
class Named:
    """A tensor's name without its indices. `leading`: the dims of axes before the tensor's own."""

    template: str
    layer: int | None = None
    expert: int | None = None
    leading: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How to read a dialect's names, and the formulas of their axes.

    `present`: term -> endings; it is true if a name ends like one of them ("no x": if none does). `always`: terms of
    every checkpoint of the dialect. `dense`, `routed`: the tensors that mark a layer's kind.
    """

    read: Callable[[str], Named]
    axes: Mapping[str, tuple[str, ...]]
    present: Mapping[str, tuple[str, ...]]
    always: Mapping[str, object]
    dense: str
    routed: str


@dataclass(frozen=True)
class Equation:
    formula: Formula
    value: int
    where: str


@dataclass
class Measured:
    """Facts, formulas that are still to be solved or checked, and contradictions."""

    facts: dict[str, Fact]
    equations: list[Equation]
    problems: list[str]


def measure(layout: Layout, specs: Mapping[str, TensorSpec]) -> Measured:
    """Measure names and shapes; layers and experts may be stacked or single tensors."""
    shapes: dict[str, dict[tuple[int, ...], str]] = {}
    layers: dict[str, set[int | None]] = {}
    counts: dict[str, Fact] = {}
    for name, spec in specs.items():
        named = layout.read(name)
        where = f"{name} {spec.shape}"
        indices = (("layers", named.layer), ("experts", named.expert))
        extents = [
            *zip(named.leading, spec.shape, strict=False),
            *((dim, index + 1) for dim, index in indices if index is not None),
        ]
        for dim, count in extents:
            if dim not in counts or counts[dim].value < count:
                counts[dim] = Fact(count, where)
        if named.template in layout.axes:
            layers.setdefault(named.template, set()).add(named.layer)
            shapes.setdefault(named.template, {}).setdefault(spec.shape[len(named.leading) :], where)
    measured = Measured(counts, [], [])
    _present(measured, layout, specs)
    routed, dense = layers.get(layout.routed, set()), layers.get(layout.dense, set())
    if routed and None not in routed | dense:
        where = "layers that have no router" if dense - routed else "every layer has a router"
        measured.facts["dense"] = Fact(tuple(sorted(layer for layer in dense - routed if layer is not None)), where)
    for template, by_shape in shapes.items():
        _equations(measured, layout.axes[template], by_shape)
    measured.problems += mistyped(measured.facts)
    return measured


def solve(measured: Measured, terms: dict[str, Fact]) -> list[str]:
    """Add to `terms` what follows from the formulas; return those that do not hold, with both numbers."""
    problems: dict[str, str] = {}
    left = list(measured.equations)
    while left:
        waiting = []
        for equation in left:
            unknown = equation.formula.names - terms.keys()
            if len(unknown) > 1:
                waiting.append(equation)
            elif unknown:
                (name,) = unknown
                value = _solved(equation, name, terms)
                if value is None:
                    problems.setdefault(str(equation.formula), _unsolved(equation, name, terms))
                else:
                    terms[name] = Fact(value, equation.where)
            elif equation.formula.count(_numbers(equation, terms)) != equation.value:
                problems.setdefault(str(equation.formula), _broken(equation, terms))
        if len(waiting) == len(left):
            break
        left = waiting
    return list(problems.values())


def _present(measured: Measured, layout: Layout, specs: Mapping[str, TensorSpec]) -> None:
    for term, value in layout.always.items():
        measured.facts[term] = Fact(value, "every checkpoint of this kind")
    for term, endings in layout.present.items():
        absent = term.startswith("no ")
        first = next((name for name in specs if name.endswith(endings)), None)
        where = first or f"no tensor ends in {' or '.join(endings)}"
        measured.facts[term.removeprefix("no ")] = Fact((first is None) is absent, where)


def _equations(measured: Measured, axes: tuple[str, ...], shapes: Mapping[tuple[int, ...], str]) -> None:
    """Turn the shapes of one kind of tensor into facts and equations."""
    if len(shapes) > 1:
        several = "; ".join(sorted(shapes.values())[:4])
        why = f"layers differ in shape, which no supported architecture does: {several}"
        measured.problems.append(f"{why}; give the checkpoint from before it was pruned")
        return
    [(shape, where)] = shapes.items()
    if len(shape) != len(axes):
        measured.problems.append(f"{where}: {len(axes)} axes are expected ({', '.join(axes)}), not {len(shape)}")
        return
    for text, extent in zip(axes, shape, strict=True):
        if not text.isidentifier():
            measured.equations.append(Equation(parse_formula(text, _PLACE), extent, where))
        elif measured.facts.setdefault(text, Fact(extent, where)).value != extent:
            measured.problems.append(
                f"the tensors contradict each other in `{text}`: {extent} by {where}, {measured.facts[text]}"
            )


def _numbers(equation: Equation, terms: Facts, **given: int) -> dict[str, object]:
    return {name: given[name] if name in given else terms[name].value for name in equation.formula.names}


def _solved(equation: Equation, name: str, terms: Facts) -> int | None:
    """Solve a formula that is linear in `name`; None without a whole positive solution."""
    at_zero, at_one = (equation.formula.count(_numbers(equation, terms, **{name: x})) for x in (0, 1))
    slope, rest = at_one - at_zero, equation.value - at_zero
    return rest // slope if slope and rest % slope == 0 and rest // slope > 0 else None


def _unsolved(equation: Equation, name: str, terms: Facts) -> str:
    known = listing(terms, equation.formula.names - {name})
    return f"no whole {name} gives {equation.formula} = {equation.value} ({equation.where}) with {known}"


def _broken(equation: Equation, terms: Facts) -> str:
    result, known = shown(equation.formula.count(_numbers(equation, terms))), listing(terms, equation.formula.names)
    return f"{equation.formula} = {result} ({known}), but the tensors have {equation.value}: {equation.where}"
