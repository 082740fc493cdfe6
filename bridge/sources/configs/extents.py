"""Derive a model's terms from the names and shapes of its tensors.

An axis of a tensor is a formula over terms (`(heads + 2 * kv_heads) * head_dim`). One unknown in it is solved for;
with none, the formula is a check. The names are those of Megatron-Core, torchtitan and Meta.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bridge.core.mappings import mappings, read_table
from bridge.core.values import TensorSpec
from bridge.sources.configs.facts import Fact, Facts, listing, mistyped, shown
from bridge.tables.expressions.grammar import Formula, parse_formula

_TABLE = read_table(mappings() / "native_axes.toml")
_TITAN_TODAY = _TABLE.texts("titan_today")


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
    axes: Mapping[str, Sequence[str]]
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
        for term, numbers, why in (("dense", dense - routed, where), ("routed", routed, "layers that have a router")):
            measured.facts[term] = Fact(tuple(sorted(layer for layer in numbers if layer is not None)), why)
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


def _equations(measured: Measured, axes: Sequence[str], shapes: Mapping[tuple[int, ...], str]) -> None:
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
            measured.equations.append(Equation(parse_formula(text, _TABLE.place("", text)), extent, where))
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


_MEGATRON_NAME = re.compile(
    r"(?:module\.|model\.)*(?:"  # NeMo 2, NeMo 1, and both at once
    r"(?P<outside>(?:embedding|output_layer|decoder\.final_layernorm)\..*)|"
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<inside>.*))"
)
_MEGATRON_EXPERT = re.compile(
    r"mlp\.experts\.(?:(?P<kind>local_experts|experts)\.(?:(?P<e>\d+)\.)?)?(?P<rest>linear_fc[12]\.\w+?)(?P<last>\d+)?"
)
_GGUF_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<inside>.*)")
_TITAN_NAME = re.compile(r"layers\.(?P<layer>\d+)\.(?P<inside>.*)")


def layout_of(dialect: str, specs: Mapping[str, TensorSpec]) -> Layout:
    """Return the layout of `megatron`, `torchtitan`, `meta` or `gguf`; latent attention has its own tensors."""
    kind, read = _READERS.get(dialect, ("titan", _titan_name))
    present = {term: tuple(endings) for term, endings in _TABLE.section(f"{kind}_present").items()}
    latent, sinks = (any(name.endswith(present[term]) for name in specs) for term in ("mla", "sinks"))
    axes = _TABLE.section(kind) | _TABLE.section(f"{kind}_{'latent' if latent else 'attention'}")
    always = _TABLE.section(f"{kind}_always") | (_TABLE.section(f"{kind}_sinks") if sinks else {})
    return Layout(read, axes, present, always, **_TABLE.texts(f"{kind}_layers"))


def _megatron_name(name: str) -> Named:
    match = _MEGATRON_NAME.fullmatch(name)
    if not match:
        return Named(name)
    if match["outside"]:
        return Named(match["outside"])
    layer = _number(match["layer"])
    leading = () if match["layer"] else ("layers",)
    expert = _MEGATRON_EXPERT.fullmatch(match["inside"])
    if not expert:
        return Named(f"layer.{match['inside']}", layer, None, leading)
    index = expert["e"] or expert["last"]
    if index is None:
        leading = (*leading, "experts")
    return Named(f"layer.mlp.experts.{expert['rest']}", layer, _number(index), leading)


def _titan_name(name: str) -> Named:
    match = _TITAN_NAME.fullmatch(name)
    template = f"layer.{match['inside']}" if match else name
    for new, old in _TITAN_TODAY.items():
        if template.startswith(new):
            template = old + template.removeprefix(new)
    return Named(template, _number(match["layer"] if match else None))


def _gguf_name(name: str) -> Named:
    match = _GGUF_NAME.fullmatch(name)
    return Named(f"layer.{match['inside']}", _number(match["layer"])) if match else Named(name)


_READERS = {"megatron": ("megatron", _megatron_name), "gguf": ("gguf", _gguf_name)}


def _number(index: str | None) -> int | None:
    """Read a layer's or an expert's number; Python refuses the longest, whose first digits are too large anyway."""
    return int(index[:12]) if index else None
