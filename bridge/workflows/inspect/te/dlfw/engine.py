"""Answer the calls of Transformer Engine's modules by a config's features."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bridge.workflows.inspect.changes.layer_changes import CHANGING, DISABLING, LayerChanges, add_features
from bridge.workflows.inspect.collect import LOGS, Seen, Sums, gather
from bridge.workflows.inspect.dumps import FEATURE as DUMP
from bridge.workflows.inspect.dumps import Dumps
from bridge.workflows.inspect.result import Record
from bridge.workflows.inspect.routes import GEMMS_OF, Route
from bridge.workflows.inspect.statistics.quantization import DELAYED
from bridge.workflows.inspect.te.classes import Answer, FeatureClass
from bridge.workflows.inspect.te.dlfw.recipes import CallersSchemes, recipe_of
from bridge.workflows.inspect.te.dlfw.reduction import Over, added_up, over
from bridge.workflows.inspect.te.read import InspectConfig
from bridge.workflows.inspect.te.resolve import routes_of

if TYPE_CHECKING:
    from torch import Tensor


class Engine:
    """The features of a config, behind the seven calls, for layers whose names come with the calls.

    A routing call returns whether the feature runs at `iteration`, and the next step to ask at, None for never. Several
    features of one call: it runs if one does; a GEMM is quantized if none is against it.
    """

    def __init__(
        self,
        config: InspectConfig,
        own: Mapping[str, FeatureClass],
        schemes: CallersSchemes,
        dumps: Dumps | None = None,
    ) -> None:
        self.config, self._own, self._schemes, self._dumps = config, own, schemes, dumps
        self.group: Any = None  # over which sums are added up; None takes all processes
        self._routes: dict[str, tuple[Route, ...]] = {}
        self._sums: dict[tuple[str, str], tuple[Sums, Over | None]] = {}
        self._changed: dict[str, tuple[int, LayerChanges]] = {}
        self._weights: set[str] = set()
        self._last: Seen | None = None

    # routing

    def fp8_gemm_enabled(self, layer_name: str, gemm: str, iteration: int, **_: Any) -> Answer:
        """Whether the inputs of a GEMM are quantized."""
        answers: list[Answer] = []
        for route in self._at(layer_name, gemm=gemm, either=True):
            if route.own:
                answers += [] if route.tensor else self._asked("fp8_gemm_enabled", route, iteration, gemm=gemm)
            elif route.feature in DISABLING or route.feature == "FakeQuant":
                answers.append((not route.schedule.due(iteration), route.schedule.next_due(iteration)))
        return all(now for now, _ in answers), _least(answers)

    def modify_tensor_enabled(self, layer_name: str, gemm: str, tensor_name: str, iteration: int, **_: Any) -> Answer:
        """Whether `modify_tensor` makes what a GEMM takes or gives."""
        routes, words = self._changing(layer_name, tensor_name, gemm), {"gemm": gemm, "tensor_name": tensor_name}
        return self._any(routes, "modify_tensor_enabled", iteration, **words)

    def inspect_tensor_enabled(self, layer_name: str, tensor_name: str, iteration: int, **_: Any) -> Answer:
        """Whether `inspect_tensor` is to be called."""
        routes = self._looking(layer_name, tensor_name)
        return self._any(routes, "inspect_tensor_enabled", iteration, tensor_name=tensor_name)

    def inspect_tensor_postquantize_enabled(
        self, layer_name: str, gemm: str, tensor_name: str, iteration: int, **_: Any
    ) -> Answer:
        """Deprecated: whether `inspect_tensor_postquantize` is to be called."""
        own = (route for route in self._at(layer_name, tensor_name) if route.own)
        words = {"gemm": gemm, "tensor_name": tensor_name}
        return self._any(own, "inspect_tensor_postquantize_enabled", iteration, **words)

    # tensors

    def modify_tensor(
        self,
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: Tensor,
        default_quantizer: Any = None,
        iteration: int = 0,
        out: Any = None,
        dtype: Any = None,
        **_: Any,
    ) -> Any:
        """What a GEMM takes or gives in place of `tensor`; None if it is written to `out`."""
        for route in self._changing(layer_name, tensor_name, gemm):
            words = {"gemm": gemm, "tensor_name": tensor_name}
            if route.own:
                if not any(now for now, _ in self._asked("modify_tensor_enabled", route, iteration, **words)):
                    continue
                given = {"tensor": tensor, "default_quantizer": default_quantizer, "out": out, "dtype": dtype}
                return self._own[route.feature].call("modify_tensor", route, iteration, **words, **given)
            if route.schedule.due(iteration):
                if route.feature == "PerTensorScaling" and recipe_of(default_quantizer) == DELAYED:
                    return _scaled_by_transformer_engine(tensor, default_quantizer, out)
                make = self._changes(layer_name, iteration).modified.get((gemm, tensor_name), _as_it_is)
                if out is None:
                    return make(tensor).to(dtype or tensor.dtype)
                out.copy_(make(tensor))
                return None
        raise NotImplementedError(
            f"modify_tensor of {layer_name}, {gemm}, {tensor_name}: no feature of the config does it"
        )

    def inspect_tensor(
        self, layer_name: str, tensor_name: str, tensor: Tensor | None, iteration: int = 0, **words: Any
    ) -> None:
        """Add a tensor to the statistics of the step, write it, or hand it to the caller's classes."""
        row, column = (words.get(f"{way}wise_quantized_tensor") for way in ("row", "column"))
        if tensor is None:  # a weight that is kept in FP8
            kept: Any = row if row is not None else column
            tensor = kept.dequantize()
        self._schemes.quantizers[layer_name, tensor_name] = words.get("quantizer")
        seen = self._seen(layer_name, tensor_name)
        stats: list[Any] = []
        for route in self._looking(layer_name, tensor_name):
            if route.own:
                for now, _ in self._asked("inspect_tensor_enabled", route, iteration, tensor_name=tensor_name):
                    if now and "inspect_tensor" in self._own[route.feature].calls:
                        given = {**words, "tensor": tensor, "tensor_name": tensor_name}
                        self._own[route.feature].call("inspect_tensor", route, iteration, **given)
            elif route.schedule.due(iteration) and not seen:
                stats += route.options.stats if route.feature in LOGS else ()
                if route.feature == DUMP and self._dumps and tensor.numel():
                    self._dumps.add(route.layer, tensor_name, tensor.detach(), route.options, self._schemes)
        if stats and tensor.numel():
            self._add(layer_name, tensor_name, tensor.detach(), stats, over(tensor_name, words, self.group))

    def inspect_tensor_postquantize(
        self,
        layer_name: str,
        tensor_name: str,
        tensor: Any,
        iteration: int = 0,
        gemm: str | None = None,
        rowwise: bool | None = None,
        **words: Any,
    ) -> None:
        """Deprecated: hand what a GEMM takes to the caller's classes, with both `gemm` and `rowwise`."""
        row, column = GEMMS_OF[tensor_name]
        rowwise = gemm == row if rowwise is None else rowwise
        place = {"gemm": row if rowwise else column, "tensor_name": tensor_name}
        given = {**words, **place, "rowwise": rowwise, "tensor": tensor}
        for route in self._at(layer_name, tensor_name):
            if route.own and "inspect_tensor_postquantize" in self._own[route.feature].calls:
                asked = self._asked("inspect_tensor_postquantize_enabled", route, iteration, **place)
                if any(now for now, _ in asked):
                    self._own[route.feature].call("inspect_tensor_postquantize", route, iteration, **given)

    def records(self, step: int) -> list[Record]:
        """The records of the step; the next step begins empty.

        A step at which statistics are due is one for all ranks.
        """
        sums = self.taken()
        gather(own for own, _ in sums.values())
        logs = (feature for section in self.config.sections for feature in section.features if feature.name in LOGS)
        if any(use.schedule.due(step) for feature in logs for use in feature.uses):
            every = added_up(sums, self.group, self._schemes)
        else:
            every = {key: own for key, (own, _) in sums.items()}
        if self._dumps:
            self._dumps.end(step)
        return [record for each in every.values() for record in each.records(step)]

    def taken(self) -> dict[tuple[str, str], tuple[Sums, Over | None]]:
        """The sums of the step, and over which processes they are added up; the next step begins empty."""
        sums, self._sums, self._last = self._sums, {}, None
        self._weights.clear()
        return sums

    @property
    def idle(self) -> list[str]:
        """The sections that were about no layer that called."""
        met = {route.section for routes in self._routes.values() for route in routes}
        return [section.name for section in self.config.sections if section.features and section.name not in met]

    def _at(self, layer: str, tensor: str = "", gemm: str = "", either: bool = False) -> Iterator[Route]:
        """The routes for a tensor and a GEMM, for it alone or for each; `either`: for any tensor of the GEMM."""
        if layer not in self._routes:
            self._routes[layer] = routes_of(self.config, layer)
        for route in self._routes[layer]:
            whole = (route.tensor, route.gemm) == ("", "")
            if whole or (route.gemm == gemm and (either or route.tensor == tensor)):
                yield route

    def _looking(self, layer: str, tensor: str) -> Iterator[Route]:
        return (r for r in self._at(layer, tensor) if r.own or r.feature in (*LOGS, DUMP))

    def _changing(self, layer: str, tensor: str, gemm: str) -> Iterator[Route]:
        return (r for r in self._at(layer, tensor, gemm) if r.changes and (r.own or r.tensor))

    def _changes(self, layer: str, iteration: int) -> LayerChanges:
        """What the features of this package change at a step."""
        step, made = self._changed.get(layer, (None, None))
        if made is None or step != iteration:
            routes = self._routes[layer]
            made = LayerChanges(routes[0].layer)
            due = (route for route in routes if route.feature in CHANGING and route.schedule.due(iteration))
            add_features(made, due, self._schemes, quantizes=True)
            self._changed[layer] = iteration, made
        return made

    def _asked(self, call: str, route: Route, iteration: int, **words: Any) -> list[Answer]:
        """The answer of a caller's class; none if it has not this call."""
        feature = self._own[route.feature]
        return [feature.ask(call, route, iteration, **words)] if call in feature.calls else []

    def _any(self, routes: Iterable[Route], call: str, step: int, **words: Any) -> Answer:
        """The answer of several features: it runs if one does."""
        answers: list[Answer] = []
        for route in routes:
            due = (route.schedule.due(step), route.schedule.next_due(step))
            answers += self._asked(call, route, step, **words) if route.own else [due]
        return any(now for now, _ in answers), _least(answers)

    def _seen(self, layer: str, tensor: str) -> bool:
        """Whether a weight was seen at this step."""
        if tensor != "weight":
            return False
        before = layer in self._weights
        self._weights.add(layer)
        return before

    def _add(self, layer: str, name: str, tensor: Tensor, stats: list[Any], where: Over | None) -> None:
        key = layer, name
        if key not in self._sums:
            self._sums[key] = Sums(self._routes[layer][0].layer, name, stats, self._schemes), where
        if self._last is None or not self._last.is_of(tensor, None, False):
            self._last = Seen(tensor, None, False)
        self._sums[key][0].add(self._last)


def told(record: Record) -> tuple[str, float, int]:
    """A record as loggers take it: name, value, step."""
    value = math.nan if record.value is None else record.value
    return f"{record.layer}_{record.tensor}_{record.stat}", value, record.step


def _least(answers: list[Answer]) -> int | None:
    return min((later for _, later in answers if later is not None), default=None)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _scaled_by_transformer_engine(tensor: Tensor, quantizer: Any, out: Any) -> Any:
    """A tensor of Transformer Engine's own class, which its GEMM takes."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    by = Float8CurrentScalingQuantizer(quantizer.dtype, device=tensor.device)
    if out is None:
        return by(tensor.contiguous())
    by.update_quantized(tensor.contiguous(), out)
    return None
