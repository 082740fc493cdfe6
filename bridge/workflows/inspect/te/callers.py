"""Run the caller's feature classes in a session: ask, hand tensors over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.core.errors import InspectError
from bridge.workflows.inspect.changes.layer_changes import LayerChanges, Make
from bridge.workflows.inspect.language import RunningFeatures
from bridge.workflows.inspect.layers import Layer
from bridge.workflows.inspect.routes import GEMMS, GEMMS_OF, TAKES, TENSORS, Route, Routing
from bridge.workflows.inspect.te.classes import FeatureClass, unnamed

if TYPE_CHECKING:
    from torch import Tensor

Place = tuple[str, str, str]  # call, tensor, GEMM; "" for none


@dataclass
class CallersFeatures(RunningFeatures):
    """The classes that a config names, for the layers of a session. `step` asks what runs at a step.

    A class hears of a layer again at the step that it named, and never after None. `quantizes`: layers whose operands
    the session's scheme quantizes; of others no class is asked whether a GEMM is quantized.
    """

    classes: Mapping[str, FeatureClass]
    routing: Routing
    quantizes: frozenset[str] = frozenset()
    current: int = 0
    _next: dict[tuple[Route, Place], int | None] = field(default_factory=dict)
    _running: dict[tuple[str, Place], list[Route]] = field(default_factory=dict)
    _changes: dict[str, LayerChanges] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """A note if no section names any of the classes."""
        return unnamed(self.classes, (route.feature for route in self.routing.routes))

    def step(self, step: int) -> None:
        """Ask all routing calls that are due."""
        self.current = step
        self._running.clear()
        self._changes.clear()
        for routes in self.routing.layers.values() if self.classes else ():
            for route in (route for route in routes if route.own):
                calls = self.classes[route.feature].calls
                for place in _places(route, route.layer.name in self.quantizes):
                    if place[0] not in calls:
                        continue
                    later = self._next.get((route, place), step)
                    if later is not None and step >= later and self._is_on(route, place):
                        self._running.setdefault((route.layer.name, place), []).append(route)

    def wanted(self, layer: str) -> frozenset[str]:
        """The tensors of a layer that a class looks at."""
        return frozenset(place[1] for name, place in self._running if name == layer and place[0] == "inspect_tensor")

    def see(self, layer: Layer, name: str, tensor: Tensor) -> None:
        """Hand a tensor over, with what its GEMMs take, dequantized."""
        for route in self._running.get((layer.name, ("inspect_tensor", name, "")), ()):
            row, column = (self._taken(layer.name, gemm, name, tensor) for gemm in GEMMS_OF.get(name, ("", "")))
            self._call(
                route, "inspect_tensor", tensor_name=name, tensor=tensor, quantizer=self._quantizer(layer.name, name),
                tp_group=None, tp_size=1, rowwise_quantized_tensor=row, columnwise_quantized_tensor=column,
            )  # fmt: skip

    def change(self, changes: LayerChanges) -> None:
        """Add the changes of the classes to a layer, and show them the operands of its GEMMs."""
        layer = changes.layer.name
        self._changes[layer] = changes
        for gemm in GEMMS:
            if (layer, ("fp8_gemm_enabled", "", gemm)) in self._running:
                changes.disabled.add(gemm)
            for name in TAKES[gemm]:
                routes = self._running.get((layer, ("modify_tensor", name, gemm)), [])
                if len(routes) + ((gemm, name) in changes.modified) > 1:
                    raise InspectError(
                        f"{layer}: {', '.join(route.feature for route in routes)}: {name} of {gemm} is changed by two "
                        "features; leave one of them out"
                    )
                if routes:
                    changes.modified[gemm, name] = partial(self._modified, routes[0], gemm, name)
        for (place_layer, (call, name, gemm)), routes in self._running.items():
            if place_layer == layer and call == "inspect_tensor_postquantize" and (make := changes.make_of(gemm, name)):
                changes.modified[gemm, name] = partial(self._told, routes, gemm, name, make)

    def _is_on(self, route: Route, place: Place) -> bool:
        call, name, gemm = place
        asked = call if call == "fp8_gemm_enabled" else f"{call}_enabled"
        words = {"tensor_name": name} if name else {}
        words |= {"gemm": gemm} if gemm else {}
        now, later = self.classes[route.feature].ask(asked, route, self.current, **words)
        self._next[route, place] = later
        return not now if call == "fp8_gemm_enabled" else now

    def _modified(self, route: Route, gemm: str, name: str, tensor: Tensor) -> Tensor:
        made = self._call(
            route, "modify_tensor", gemm=gemm, tensor_name=name, tensor=tensor,
            default_quantizer=self._quantizer(route.layer.name, name), out=None, dtype=tensor.dtype,
        )  # fmt: skip
        if getattr(made, "shape", None) != tensor.shape or made.dtype != tensor.dtype:
            what = f"{made.dtype} {tuple(made.shape)}" if hasattr(made, "dtype") else f"{made!r}"[:80]
            raise InspectError(
                f"feature {route.feature}, modify_tensor of layer {route.layer.name}: returned {what} for {name} of "
                f"{gemm}; expected a tensor {tensor.dtype} {tuple(tensor.shape)}"
            )
        found: Tensor = made
        return found

    def _told(self, routes: Sequence[Route], gemm: str, name: str, make: Make, tensor: Tensor) -> Tensor:
        made = make(tensor)
        for route in routes:
            rowwise = gemm == GEMMS_OF[name][0]
            self._call(
                route, "inspect_tensor_postquantize", gemm=gemm, tensor_name=name, tensor=made, rowwise=rowwise,
                tp_group=None,
            )  # fmt: skip
        return made

    def _call(self, route: Route, call: str, **words: Any) -> Any:
        return self.classes[route.feature].call(call, route, self.current, **words)

    def _quantizer(self, layer: str, name: str) -> Make | None:
        """How the session's scheme quantizes a tensor."""
        return self._changes[layer].quantized.get(name) if layer in self._changes else None

    def _taken(self, layer: str, gemm: str, name: str, tensor: Tensor) -> Tensor | None:
        """What a GEMM takes; None of GEMM's results, and where a class of the caller's makes it."""
        if not gemm or (layer, ("modify_tensor", name, gemm)) in self._running:
            return None
        tapped = (layer, ("inspect_tensor_postquantize", name, gemm)) in self._running
        make = self._changes[layer].make_of(gemm, name) if layer in self._changes else None
        make = make.args[-1] if tapped and isinstance(make, partial) else make
        return make(tensor) if make else tensor


def _places(route: Route, quantizes: bool) -> Iterator[Place]:
    """The calls that a route of a class may run: with a tensor, a GEMM, both, or for the whole layer with each."""
    whole = not route.tensor and not route.gemm
    if whole or not route.gemm:
        for name in TENSORS if whole else (route.tensor,):
            yield "inspect_tensor", name, ""
            yield from (("inspect_tensor_postquantize", name, gemm) for gemm in GEMMS_OF.get(name, ()))
    for gemm in GEMMS if whole else (route.gemm,) if route.gemm else ():
        if quantizes and (whole or not route.tensor):
            yield "fp8_gemm_enabled", "", gemm
        yield from (("modify_tensor", name, gemm) for name in (TAKES[gemm] if whole else (route.tensor,)) if name)
