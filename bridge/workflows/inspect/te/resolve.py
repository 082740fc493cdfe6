"""Resolve a config against the layers of a model.

routing = load_routing("config.yaml", layers_of(model))
routing.due(step)                        # layer -> its routes at this step
routing.at("model.layers.0.mlp.down_proj", "activation")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product

from bridge.core.parsing.problems import Problems
from bridge.core.text import named
from bridge.quant.schemes.scheme import Scheme
from bridge.workflows.inspect.changes.gemms import INSTEAD
from bridge.workflows.inspect.language import Config
from bridge.workflows.inspect.layers import Layer, number_in
from bridge.workflows.inspect.routes import Route, Routing, Use
from bridge.workflows.inspect.te.features import Feature, clashes
from bridge.workflows.inspect.te.read import InspectConfig, Section, parse_config, raise_problems
from bridge.workflows.inspect.te.selectors import depth_of
from bridge.workflows.inspect.te.where import Known, OwnFeature


def load_routing(
    config: Config, layers: Sequence[Layer], session: Scheme | None = None, own: Iterable[OwnFeature] = ()
) -> Routing:
    """Read a config and resolve it; one InspectError lists its own mistakes and what does not fit the model."""
    problems = Problems()
    parsed = parse_config(config, Known(session, {feature.name: feature for feature in own}), problems)
    depth = depth_of(layers)
    matched: list[tuple[Section, list[Layer]]] = []
    for section in parsed.sections:
        if section.features or not section.generic:  # generic ones answer calls about layers of any name
            for text in section.selector.problems(layers):
                problems.add(f"section {section.name!r}: {text}")
        matched.append((section, [layer for layer in layers if section.selector.matches(layer, depth)]))
    _check_changes(matched, problems)
    place = {layer.name: number for number, layer in enumerate(layers)}
    routes = [route for section, found in matched for layer in found for route in _routes(section, layer)]
    raise_problems(parsed.where, problems)
    return Routing(tuple(sorted(routes, key=lambda route: place[route.layer.name])), parsed.digest)


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


def _routes(section: Section, layer: Layer) -> Iterator[Route]:
    for feature in section.features:
        for use in feature.uses:
            yield Route(
                **vars(use),
                layer=layer,
                section=section.name,
                feature=feature.name,
                changes=feature.changes,
                own=feature.own,
            )


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
