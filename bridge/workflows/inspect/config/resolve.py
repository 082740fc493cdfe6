"""Resolve a config against the layers of a model.

routing = load_routing("config.yaml", layers_of(model))
routing.due(step)                        # layer -> its routes at this step
routing.at("model.layers.0.mlp.down_proj", "activation")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Any

from bridge.core.parsing.problems import Problems
from bridge.core.text import named
from bridge.quant.schemes.scheme import Scheme
from bridge.workflows.inspect.changes.gemms import INSTEAD
from bridge.workflows.inspect.config.features import Feature, Options, OwnFeature, Use, clashes
from bridge.workflows.inspect.config.layers import Layer, number_in
from bridge.workflows.inspect.config.read import InspectConfig, Section, parse_config, raise_problems
from bridge.workflows.inspect.config.schedule import Schedule
from bridge.workflows.inspect.config.selectors import depth_of


@dataclass(frozen=True)
class Route:
    """A feature of a section for one layer's tensor, GEMM or both; "" for every one of them."""

    layer: Layer
    section: str
    feature: str
    tensor: str
    gemm: str
    options: Options
    schedule: Schedule
    changes: bool = False
    own: bool = False


@dataclass(frozen=True)
class Routing:
    """The routes of every layer that a config names, in the model's order. `digest`: of the config's content."""

    routes: tuple[Route, ...]
    digest: str = ""

    @cached_property
    def layers(self) -> Mapping[str, tuple[Route, ...]]:
        """The routes by the layer's name."""
        layers: dict[str, list[Route]] = {}
        for route in self.routes:
            layers.setdefault(route.layer.name, []).append(route)
        return {name: tuple(routes) for name, routes in layers.items()}

    def at(self, layer: str, tensor: str = "", gemm: str = "") -> tuple[Route, ...]:
        """The routes of one layer for exactly this tensor and GEMM; a route of the whole layer is in each answer."""
        routes = self.layers.get(layer, ())
        return tuple(route for route in routes if (route.tensor, route.gemm) in ((tensor, gemm), ("", "")))

    @cached_property
    def schedules(self) -> frozenset[Schedule]:
        """The different schedules: few, where a mixture of experts has 60,000 routes."""
        return frozenset(route.schedule for route in self.routes)

    def due(self, step: int) -> dict[str, tuple[Route, ...]]:
        """The routes that are due at a step by layer; layers without any are left out."""
        now = frozenset(schedule for schedule in self.schedules if schedule.due(step))
        if len(now) in (0, len(self.schedules)):
            return dict(self.layers) if now else {}
        due = {name: tuple(route for route in routes if route.schedule in now) for name, routes in self.layers.items()}
        return {name: routes for name, routes in due.items() if routes}

    def next_due(self, step: int) -> int | None:
        """The first step after `step` with a route that is due; None if there is none."""
        steps = (schedule.next_due(step) for schedule in self.schedules)
        return min((due for due in steps if due is not None), default=None)


def load_routing(
    config: str | Path | Mapping[str, Any] | None,
    layers: Sequence[Layer],
    session: Scheme | None = None,
    own: Iterable[OwnFeature] = (),
) -> Routing:
    """Read a config and resolve it; one InspectError lists its own mistakes and what does not fit the model."""
    problems = Problems()
    parsed = parse_config(config, problems, session, own)
    routing = _resolve(parsed, layers, problems)
    raise_problems(parsed.where, problems)
    return routing


def resolve(config: InspectConfig, layers: Sequence[Layer]) -> Routing:
    """Resolve a parsed config; InspectError lists what does not fit the model."""
    problems = Problems()
    routing = _resolve(config, layers, problems)
    raise_problems(config.where, problems)
    return routing


def routes_of(config: InspectConfig, layer: str) -> tuple[Route, ...]:
    """The routes of a layer that a caller names, of a model that is not known.

    InspectError where two sections change the same tensor.
    """
    called, problems = Layer(layer, number=number_in(layer)), Problems()
    found = [(section, [called]) for section in config.sections if section.selector.matches(called, 0)]
    _check_changes(found, problems)
    raise_problems(config.where, problems)
    return tuple(route for section, _ in found for route in _routes(section, called))


def generic_uses(config: InspectConfig, layer: str, tensor: str) -> list[Use]:
    """The generic features for an explicit call, whose layer and tensor have any names."""
    called = Layer(layer, number=number_in(layer))
    return [
        use
        for section in config.sections
        if section.selector.matches(called, 0)
        for feature in section.generic
        for use in feature.uses
        if use.tensor == tensor
    ]


def _resolve(config: InspectConfig, layers: Sequence[Layer], problems: Problems) -> Routing:
    depth = depth_of(layers)
    matched: list[tuple[Section, list[Layer]]] = []
    for section in config.sections:
        if section.features or not section.generic:  # generic ones answer calls about layers of any name
            for text in section.selector.problems(layers):
                problems.add(f"section {section.name!r}: {text}")
        matched.append((section, [layer for layer in layers if section.selector.matches(layer, depth)]))
    _check_changes(matched, problems)
    place = {layer.name: number for number, layer in enumerate(layers)}
    routes = [route for section, found in matched for layer in found for route in _routes(section, layer)]
    return Routing(tuple(sorted(routes, key=lambda route: place[route.layer.name])), config.digest)


def _routes(section: Section, layer: Layer) -> Iterator[Route]:
    for feature in section.features:
        for use in feature.uses:
            yield Route(
                layer, section.name, feature.name, use.tensor, use.gemm, use.options, use.schedule, feature.changes,
                feature.own,
            )  # fmt: skip


def _check_changes(matched: Sequence[tuple[Section, list[Layer]]], problems: Problems) -> None:
    """Record tensors that two sections change, and layers of which none can be changed."""
    for section, layers in matched:
        fixed: dict[str, list[str]] = {}
        for layer in layers:
            if layer.fixed:
                fixed.setdefault(layer.fixed, []).append(layer.name)
        for feature, why in product(_changing(section), fixed):
            problems.add(
                f"section {section.name!r}: {feature.name} cannot change {why}: {named(fixed[why])}; {INSTEAD}"
            )
    for (one, layers), (other, others) in combinations(matched, 2):
        both = {layer.name for layer in layers} & {layer.name for layer in others}
        for first in _changing(one) if both else ():
            for second in _changing(other):
                if places := clashes(first, second):
                    problems.add(
                        f"sections {one.name!r} ({first.name}) and {other.name!r} ({second.name}) both change "
                        f"{', '.join(places)} of {named(both)}; narrow one of them"
                    )


def _changing(section: Section) -> list[Feature]:
    return [feature for feature in section.features if feature.changes]
