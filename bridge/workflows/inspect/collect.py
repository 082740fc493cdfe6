"""Add up what a step's tensors tell, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.core.text import number
from bridge.quant.schemes.catalog import named_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.memory import bits_of
from bridge.workflows.inspect.config.layers import Layer
from bridge.workflows.inspect.config.resolve import Route
from bridge.workflows.inspect.config.stat_names import QuantStat, TensorStat
from bridge.workflows.inspect.losses import LossSums, loss, losses
from bridge.workflows.inspect.quantization import RECIPES, Quantization, of_recipe, of_scheme
from bridge.workflows.inspect.result import Magnitudes, Record
from bridge.workflows.inspect.statistics import HISTOGRAM, needs_magnitudes, octaves, statistic
from bridge.workflows.inspect.sums import Blocks, TensorSums

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("float32", "float16", "bfloat16")  # dtypes that are summed as they are; others as float32
LOGS = ("LogTensorStats", "LogFp8TensorStats", "LogNvfp4TensorStats", "LogQuantizedTensorStats")


@dataclass(frozen=True)
class Under:
    """How a tensor is quantized for its statistics; `amax` is that of a calibration, None without one."""

    how: Quantization
    columnwise: bool
    amax: float | None


@dataclass(frozen=True)
class Schemes:
    """What a config's schemes mean in a session. `amax`: of the inputs, by layer, where a calibration has them."""

    session: Scheme | None = None
    amax: Mapping[str, float] = field(default_factory=dict)
    missing: dict[str, set[str]] = field(default_factory=dict)  # what has no value, and for which layers
    _known: dict[tuple[str, str], Quantization | None] = field(default_factory=dict)

    def of(self, stat: QuantStat, layer: Layer, tensor: str) -> Under | None:
        """None where the scheme leaves the tensor as it is."""
        key = (stat.scheme, tensor)
        if key not in self._known:
            self._known[key] = self._quantization(*key)
        how = self._known[key]
        if how is None:
            what = f"{stat.scheme or 'the scheme'} leaves {tensor} as it is"
            self.missing.setdefault(what, set()).add(layer.name)
            return None
        static = self.amax.get(layer.name) if how.static and tensor == "activation" else None
        return Under(how, stat.columnwise, static)

    def _quantization(self, name: str, tensor: str) -> Quantization | None:
        if name in RECIPES:
            return of_recipe(name, tensor)
        scheme = named_scheme(name) if name else self.session
        assert scheme is not None, "a statistic without a scheme is refused where the session has none"
        return of_scheme(scheme, tensor)

    @property
    def notes(self) -> list[str]:
        return [f"{what}: no statistics of {number(len(layers), 'layer')}" for what, layers in self.missing.items()]


class Sums:
    """The sums of one tensor of a layer at a step, for all statistics that are asked for."""

    def __init__(self, layer: Layer, tensor: str, stats: Iterable[TensorStat | QuantStat], schemes: Schemes) -> None:
        self.layer, self.tensor = layer, tensor
        every = list(dict.fromkeys(stats))
        self.plain = [stat for stat in every if isinstance(stat, TensorStat)]
        both = tensor in ("activation", "weight")
        self.blocks = tuple(dict.fromkeys(Blocks(s.block_size, s.dims, both) for s in self.plain if s.dims))
        self.magnitudes = any(needs_magnitudes(stat.name) for stat in self.plain)
        self.total = TensorSums(self.blocks, magnitudes=self.magnitudes)
        found = ((stat, schemes.of(stat, layer, tensor)) for stat in every if isinstance(stat, QuantStat))
        self.quantized = [(stat, under) for stat, under in found if under is not None]
        self.lost: dict[Under, LossSums] = {under: LossSums() for _, under in self.quantized}

    def add(self, seen: Seen) -> None:
        if self.plain:
            self.total = self.total.merged(seen.sums(self.blocks, self.magnitudes))
        for under in self.lost:
            self.lost[under] = self.lost[under].merged(seen.losses(under))

    def records(self, step: int) -> Iterator[Record]:
        """A record for each statistic; none if the tensor was not seen."""
        for stat in self.plain if self.total.numel else ():
            if stat.name != HISTOGRAM:
                label = stat.label(self.tensor)
                yield self._record(step, label, statistic(self.total, label))
        for lossy, under in self.quantized:
            if self.lost[under].numel:
                yield self._record(step, lossy.label(self.tensor), loss(self.lost[under], lossy.name))

    def counts(self, step: int) -> Iterator[Magnitudes]:
        if self.total.numel and any(stat.name == HISTOGRAM for stat in self.plain):
            counts = tuple(sorted(octaves(self.total).items()))
            rest = self.total.finite - sum(count for _, count in counts)
            yield Magnitudes(step, self.layer.name, self.tensor, counts, rest)

    def _record(self, step: int, label: str, value: float) -> Record:
        told = value if math.isfinite(value) else None
        return Record(step, self.layer.name, self.layer.role, self.tensor, label, told)


class Seen:
    """One tensor and what was computed of it, for all layers that read it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        own = str(tensor.dtype).removeprefix("torch.")
        self.dtype = own if own in FLOATS else "float32"
        self.bits = bits_of(tensor if own in FLOATS else tensor.float(), self.dtype)
        self._made: dict[Any, Any] = {}

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor with the same values; its memory is held, so that no other has it."""
        mine = self.tensor
        same = mine.data_ptr() == tensor.data_ptr() and mine.stride() == tensor.stride()
        return same and (mine.shape, mine.dtype, self.version) == (tensor.shape, tensor.dtype, tensor._version)

    def sums(self, blocks: tuple[Blocks, ...], magnitudes: bool) -> TensorSums:
        if (blocks, magnitudes) not in self._made:
            made = self._made[blocks, magnitudes] = TensorSums(blocks, magnitudes=magnitudes)
            made.add(self.bits, self.dtype)
        found: TensorSums = self._made[blocks, magnitudes]
        return found

    def losses(self, under: Under) -> LossSums:
        if under not in self._made:
            made = losses(self.bits, self.dtype, under.how, amax=under.amax, columnwise=under.columnwise)
            self._made[under] = made
        found: LossSums = self._made[under]
        return found


class Collector:
    """The sums of one step, for the routes that are due."""

    def __init__(
        self, due: Mapping[str, Sequence[Route]], schemes: Schemes, weights: dict[str, Seen] | None = None
    ) -> None:
        """weights: what earlier steps computed of weights, by layer; those that did not change are taken from it."""
        self._last: Seen | None = None
        self._weights = {} if weights is None else weights
        self.sums: dict[tuple[str, str], Sums] = {}
        for name, routes in due.items():
            asked: dict[str, list[TensorStat | QuantStat]] = {}
            for route in routes:
                if route.feature in LOGS and not route.own:
                    asked.setdefault(route.tensor, []).extend(route.options.stats)
            for tensor, stats in asked.items():
                self.sums[name, tensor] = Sums(routes[0].layer, tensor, stats, schemes)

    def wanted(self, layer: str) -> frozenset[str]:
        """The tensors of a layer that are looked at."""
        return frozenset(tensor for name, tensor in self.sums if name == layer)

    def see(self, layer: Layer, name: str, tensor: Tensor) -> None:
        """Add a tensor; it is only read."""
        if not tensor.numel():
            return
        if name == "weight":
            seen = self._weights.get(layer.name)
            if seen is None or not seen.is_of(tensor):
                seen = self._weights[layer.name] = Seen(tensor)
        elif self._last is None or not self._last.is_of(tensor):
            seen = self._last = Seen(tensor)
        else:
            seen = self._last
        self.sums[layer.name, name].add(seen)

    def records(self, step: int) -> list[Record]:
        return [record for sums in self.sums.values() for record in sums.records(step)]

    def magnitudes(self, step: int) -> list[Magnitudes]:
        return [counts for sums in self.sums.values() for counts in sums.counts(step)]
