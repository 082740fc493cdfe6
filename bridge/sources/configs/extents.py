"""What the tensors of a foreign checkpoint tell of its model: extents and what is there; reads names and shapes only.

An axis of a tensor is a formula over terms (`(heads + 2 * kv_heads) * head_dim`). One unknown in it is solved for;
with none, the formula is a check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bridge.sources.foreign_config.kinds import mistyped
from bridge.sources.foreign_config.said import Said, Saying, shown
from bridge.tables.files import Place
from bridge.tables.grammar import Formula, parse_formula
from bridge.values import TensorSpec

_PLACE = Place("bridge/sources/foreign_config", 1, "")


@dataclass(frozen=True)
class Named:
    """A tensor's name without its indices. `leading`: the dims whose axes stand before the tensor's own."""

    template: str
    layer: int | None = None
    expert: int | None = None
    leading: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A dialect's tensors as far as they tell something: how names are read, and the formulas of their axes.

    `present`: what is so where a name ends like one of these ("no x": where none does). `always`: what every
    checkpoint of the dialect has. `dense`, `routed`: the tensors that mark a layer's kind.
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
    """What was found: facts, formulas still to be solved or checked, and what does not hold together already."""

    facts: dict[str, Said]
    equations: list[Equation]
    problems: list[str]


def measure(layout: Layout, specs: Mapping[str, TensorSpec]) -> Measured:
    """Return what names and shapes tell; stacked layers and experts count as well as single ones."""
    shapes: dict[str, dict[tuple[int, ...], str]] = {}
    layers: dict[str, set[int | None]] = {}
    counts: dict[str, Said] = {}
    for name, spec in specs.items():
        named = layout.read(name)
        where = f"{name} {spec.shape}"
        found = list(zip(named.leading, spec.shape, strict=False))
        found += [
            (dim, index + 1) for dim, index in (("layers", named.layer), ("experts", named.expert)) if index is not None
        ]
        for dim, count in found:
            if dim not in counts or counts[dim].value < count:
                counts[dim] = Said(count, where)
        if named.template in layout.axes:
            layers.setdefault(named.template, set()).add(named.layer)
            shapes.setdefault(named.template, {}).setdefault(spec.shape[len(named.leading) :], where)
    measured = Measured(counts, [], [])
    _present(measured, layout, specs)
    routed, dense = layers.get(layout.routed, set()), layers.get(layout.dense, set())
    if routed and None not in routed | dense:
        where = "layers that have no router" if dense - routed else "every layer has a router"
        measured.facts["dense"] = Said(tuple(sorted(layer for layer in dense - routed if layer is not None)), where)
    for template, found_shapes in shapes.items():
        _equations(measured, layout.axes[template], found_shapes)
    measured.problems += mistyped(measured.facts)
    return measured


def solve(measured: Measured, terms: dict[str, Said]) -> list[str]:
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
                name = next(iter(unknown))
                found = _solved(equation, name, terms)
                if found is None:
                    problems.setdefault(str(equation.formula), _unsolved(equation, name, terms))
                else:
                    terms[name] = Said(found, equation.where)
            elif equation.formula.count(_numbers(equation, terms)) != equation.value:
                problems.setdefault(str(equation.formula), _broken(equation, terms))
        if len(waiting) == len(left):
            break
        left = waiting
    return list(problems.values())


def _present(measured: Measured, layout: Layout, specs: Mapping[str, TensorSpec]) -> None:
    for term, value in layout.always.items():
        measured.facts[term] = Said(value, "every checkpoint of this kind")
    for term, endings in layout.present.items():
        absent = term.startswith("no ")
        found = next((name for name in specs if name.endswith(endings)), None)
        where = found or f"no tensor ends in {' or '.join(endings)}"
        measured.facts[term.removeprefix("no ")] = Said((found is None) is absent, where)


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
        elif measured.facts.setdefault(text, Said(extent, where)).value != extent:
            measured.problems.append(
                f"the tensors contradict each other in `{text}`: {extent} by {where}, {measured.facts[text]}"
            )


def _numbers(equation: Equation, terms: Saying, **given: int) -> dict[str, object]:
    return {name: given[name] if name in given else terms[name].value for name in equation.formula.names}


def _solved(equation: Equation, name: str, terms: Saying) -> int | None:
    """Solve a formula that is linear in `name`; None where no whole number does it."""
    at_zero, at_one = (equation.formula.count(_numbers(equation, terms, **{name: x})) for x in (0, 1))
    slope = at_one - at_zero
    if slope == 0 or (equation.value - at_zero) % slope or (equation.value - at_zero) // slope <= 0:
        return None
    return (equation.value - at_zero) // slope


def _unsolved(equation: Equation, name: str, terms: Saying) -> str:
    known = ", ".join(str(terms[other]) for other in sorted(equation.formula.names - {name}))
    return f"no whole {name} gives {equation.formula} = {equation.value} ({equation.where}) with {known}"


def _broken(equation: Equation, terms: Saying) -> str:
    known = ", ".join(str(terms[name]) for name in sorted(equation.formula.names))
    result = shown(equation.formula.count(_numbers(equation, terms)))
    return f"{equation.formula} = {result} ({known}), but the tensors have {equation.value}: {equation.where}"
