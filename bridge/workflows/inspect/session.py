"""Inspect a model while it runs, with hooks where something is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.core.text import number
from bridge.tracker.eager import run_eagerly
from bridge.workflows.inspect.changes.layer_changes import Changes, Simulated
from bridge.workflows.inspect.changes.simulation import PLAIN_KV
from bridge.workflows.inspect.collect import Collector, Schemes, gather
from bridge.workflows.inspect.dumps import Dumps
from bridge.workflows.inspect.hooks.experts import ExpertsWatch
from bridge.workflows.inspect.hooks.masks import Mask, Masks
from bridge.workflows.inspect.hooks.watch import BACKWARD, Watch
from bridge.workflows.inspect.language import RunningFeatures
from bridge.workflows.inspect.layers import EXPERT, Layer, not_listed, unwrapped
from bridge.workflows.inspect.ranks import Ranks, own_part
from bridge.workflows.inspect.result import Inspection, Magnitudes, Record
from bridge.workflows.inspect.routes import Route, Routing
from bridge.workflows.inspect.save import StepsFile

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.tracker.finite import NanFinder, NotFinite

Sink = Callable[[str, float, int], None]
UNSEEN = (
    "its module was not called (another one may use its weight), or inside compiled code",
    "no backward came through, its weight is frozen, or inside compiled code",
)
UNSEEN_EXPERT = "no token came to the expert, or its module multiplies in a way that is not known"
GROUPED = "experts of a grouped module of Megatron-Core are not seen; build it with moe_grouped_gemm=False"
PADDED_EXPERTS = "experts get tokens without their places, so padding counts in"
WITH_ROWS = ("activation", "output", "gradient", "dgrad")  # tensors with a row a token


@dataclass(frozen=True)
class Setup:
    """What a session looks at and changes. `simulated`: layers that run quantized at each step."""

    routing: Routing
    schemes: Schemes
    about: Mapping[str, str] = field(default_factory=dict)
    simulated: Mapping[str, Simulated] = field(default_factory=dict)
    features: RunningFeatures = field(default_factory=RunningFeatures)


@dataclass(frozen=True)
class Outputs:
    """Where the results of a session's steps go, besides its `inspection`."""

    sink: Sink | None = None
    steps: StepsFile | None = None
    dumps: Dumps | None = None


class Session:
    """An inspection of a live model. `step` ends a step: its statistics become records, and hooks follow the schedule.

    A step may have several forward and backward passes (microbatches). Rows that `attention_mask` leaves out do not
    count. Layers that `setup` does not change have the same bits as without; `detach` leaves nothing behind.
    """

    def __init__(
        self,
        model: Any,
        setup: Setup,
        outputs: Outputs | None = None,
        ranks: Ranks | None = None,
        finder: NanFinder | None = None,
    ) -> None:
        self.outputs = outputs or Outputs()
        self.model, self.routing, self.schemes, self.about = model, setup.routing, setup.schemes, setup.about
        self._dumps, self._ranks, self._finder = self.outputs.dumps, ranks, finder
        self._inner = unwrapped(model)
        self._own = setup.features
        self._changes = Changes(self._inner, self.schemes, setup.simulated, self._own.change)
        self._masks = Masks(model)
        self.records: list[Record] = []
        self.magnitudes: list[Magnitudes] = []
        self.current = 0
        self._watches: list[Watch | ExpertsWatch] = []
        self._eager = ExitStack()
        self._bad: list[str] = []
        self._collector = Collector({}, self.schemes)
        for name in not_listed(model):
            self.schemes.note(GROUPED, Layer(name))
        self._next: int | None = self.routing.next_due(-1)
        try:
            self._arm()
        except BaseException:
            self.detach()
            raise

    def step(self) -> list[Record]:
        """End a step and go to the next; return its records, the same in all processes of a group."""
        gather(self._collector.sums.values())
        if self._ranks and self._collector.sums:
            self._ranks.add_up(self._collector.sums)
        found = self._collector.records(self.current)
        for layer, tensor in self._collector.unseen:
            why = UNSEEN_EXPERT if layer.kind == EXPERT else UNSEEN[tensor in BACKWARD]
            self.schemes.note(f"{tensor} was due and not seen: {why}", layer)
        for layer in self._changes.unused:
            self.schemes.note(f"was to be changed and was not: {UNSEEN[0]}", layer)
        self._bad = self._bad or self._collector.not_finite(self.current)
        self.records += found
        self.magnitudes += self._collector.magnitudes(self.current)
        try:
            if self.outputs.steps:
                self.outputs.steps.add(found)
            if self._dumps:
                self._dumps.end(self.current)
        finally:
            self.current += 1
            self._arm()
        sink = self.outputs.sink
        for record in found if sink else ():  # last: a step that it breaks has ended
            if record.value is not None and sink:
                sink(f"{record.layer}_{record.tensor}_{record.stat}", record.value, record.step)
        return found

    @property
    def inspection(self) -> Inspection:
        """Records, magnitudes and notes of all steps so far."""
        modules = tuple(self.routing.layers)
        first = self._finder.first if self._finder else None
        dumps = tuple(self._dumps.files) if self._dumps else ()
        seen = tuple(self.records), (), tuple(self.notes), modules, tuple(self.magnitudes)
        return Inspection(self.about, *seen, first_bad=first, dumps=dumps, noted=self.schemes.noted)

    def detach(self) -> None:
        """Remove all hooks and changes from the model; records of an unfinished step are dropped."""
        self._changes.detach()
        for watch in self._watches:
            watch.detach()
        self._watches.clear()
        self._eager.close()
        self._masks.detach()
        self._collector = Collector({}, self.schemes)
        if self._dumps:
            self._dumps.drop()

    @property
    def notes(self) -> list[str]:
        """What was not seen, and why."""
        nothing = nothing_found(self._finder.first, self.current) if self._finder else []
        roles = without_roles([routes[0].layer.role for routes in self.routing.layers.values()])
        kv = [PLAIN_KV] if self.schemes.session and self.schemes.session.kv else []
        dumps = self._dumps.notes if self._dumps else ()
        return [*self._bad, *self.schemes.note_lines(), *kv, *self._own.notes, *nothing, *roles, *dumps]

    def _arm(self) -> None:
        """Put hooks on the layers that are due at this step, and none on others; change those that are to be."""
        self.detach()
        is_due = self._next is not None and self.current >= self._next
        due = self.routing.due(self.current) if is_due else {}
        self._own.step(self.current)
        here = {name: routes for name, routes in due.items() if not self._ranks or name in self._ranks.here}
        self._changes.attach(here)
        if due:
            self._next = self.routing.next_due(self.current)
            self._collector = Collector(due, self.schemes, self._dumps)
            self._watch(here)
        if self._watches or self._changes.some:
            run_eagerly(self._eager)

    def _watch(self, here: Mapping[str, Sequence[Route]]) -> None:
        """Put hooks on the layers of routes that are due."""
        if self._collector.sums:
            self._masks.attach()
        experts: dict[str, dict[Layer, frozenset[str]]] = {}
        for name, routes in here.items():
            layer, wanted = routes[0].layer, self._collector.wanted(name) | self._own.wanted(name)
            if wanted and layer.kind == EXPERT:
                experts.setdefault(layer.module, {})[layer] = wanted
            elif wanted:
                module = self._inner.get_submodule(layer.module)
                self._watches.append(Watch(module, wanted, partial(self._see, layer), self._masks.current))
        for place, layers in experts.items():
            self._watches.append(ExpertsWatch(self._inner.get_submodule(place), layers, self._see_expert))

    def _see(self, layer: Layer, name: str, tensor: Tensor, mask: Mask | None) -> None:
        """`mask`: that of the forward in which the tensor was made, or whose backward runs."""
        tensor = own_part(name, tensor)
        kept = why = None
        if mask is not None and name in WITH_ROWS:
            kept, why = mask.rows_of(tensor)
        if why:
            self.schemes.note(f"{why}, so padding counts in {name}", layer)
        self._collector.see(layer, name, tensor, kept)
        self._own.see(layer, name, tensor)

    def _see_expert(self, layer: Layer, name: str, tensor: Tensor) -> None:
        if self._masks.current() is not None and name in WITH_ROWS:
            self.schemes.note(f"{PADDED_EXPERTS} {name}", layer)
        self._collector.see(layer, name, tensor, None)
        self._own.see(layer, name, tensor)


def without_roles(roles: Sequence[str]) -> list[str]:
    """A note where no table has any of the layers."""
    none = roles and not any(roles)
    return (
        ["layers have no roles: no table has this architecture, so that names alone tell their kinds"] if none else []
    )


def nothing_found(found: NotFinite | None, steps: int) -> list[str]:
    """A note that no NaN was found; a finding has its own line."""
    return [] if found else [f"no module made a NaN or an infinity in {number(steps, 'step')}"]
