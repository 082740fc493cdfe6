"""Statistics of a step's tensors, summed layer by layer."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from bridge.core.text import named, natural, number
from bridge.core.values import Format
from bridge.quant.codec.arrays import Array
from bridge.quant.schemes.catalog import named_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.memory import bits_of
from bridge.workflows.inspect.layers import CONV, Layer
from bridge.workflows.inspect.result import CodeRange, Magnitudes, Record
from bridge.workflows.inspect.routes import Options, QuantStat, Route, TensorStat
from bridge.workflows.inspect.statistics import on_device
from bridge.workflows.inspect.statistics.losses import LossSums, loss, losses
from bridge.workflows.inspect.statistics.on_device import DeviceSums
from bridge.workflows.inspect.statistics.quantization import RECIPES, Quantization, of_numerics, of_recipe
from bridge.workflows.inspect.statistics.sums import Blocks, TensorSums
from bridge.workflows.inspect.statistics.values import HISTOGRAM, needs_magnitudes, octaves, statistic

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("float32", "float16", "bfloat16")  # dtypes that are summed and quantized as they are; others as float32
UNCALIBRATED = "static scales without a calibration (calib=) are those of each tensor"
LARGEST = 3.4028234663852886e38  # of float32
EQUAL = 200.0  # dB of a tensor that loses nothing, and at most
LOGS = ("LogTensorStats", "LogFp8TensorStats", "LogNvfp4TensorStats", "LogQuantizedTensorStats")


@dataclass(frozen=True)
class Under:
    """How a tensor is quantized for its statistics; `amax` is that of a calibration, None without one."""

    how: Quantization
    columnwise: bool
    amax: float | None


@dataclass(frozen=True)
class Schemes:
    """What a config's schemes mean in a session.

    `formats`: of the session's scheme by layer, or why it leaves one as it is; None where the scheme has one for all.
    `amax`: of the inputs by layer, where a calibration has them. `notes`: what has no value or another meaning, and for
    which layers. `read`, `recipes`: schemes by name, recipes by name and tensor, so that each is read once.
    """

    session: Scheme | None = None
    formats: Mapping[str, Format | str] | None = None
    amax: Mapping[str, float] = field(default_factory=dict)
    notes: dict[str, set[str]] = field(default_factory=dict)
    read: dict[str, Scheme] = field(default_factory=dict)
    recipes: dict[tuple[str, str], Quantization] = field(default_factory=dict)

    def of(self, stat: QuantStat, layer: Layer, tensor: str) -> Under | None:
        """None where the scheme leaves the tensor as it is."""
        if layer.kind == CONV and tensor not in ("weight", "wgrad"):
            self.note(f"a convolution's {tensor} has no losses", layer)
            return None
        found = self.under(stat.scheme, layer, tensor)
        return replace(found, columnwise=stat.columnwise) if found else None

    def under(self, name: str, layer: Layer, tensor: str) -> Under | None:
        """How a scheme quantizes a tensor, "" that of the session; None where it leaves the tensor as it is."""
        how = self._quantization(name, layer, tensor)
        if how is None:
            self.note(f"{name or 'the scheme'} leaves {tensor} as it is", layer)
            return None
        static = self.amax.get(layer.name) if how.static and tensor == "activation" else None
        if how.static and static is None and not how.amax:
            self.note(UNCALIBRATED, layer)
        return Under(how, False, static)

    def note(self, what: str, layer: Layer) -> None:
        self.notes.setdefault(what, set()).add(layer.name)

    def note_lines(self) -> list[str]:
        """The notes in words, with the first layers of each."""
        return [f"{what}: {number(len(layers), 'layer')} ({named(layers)})" for what, layers in self.notes.items()]

    @property
    def noted(self) -> dict[str, tuple[str, ...]]:
        """The notes with all their layers."""
        return {what: tuple(sorted(layers, key=natural)) for what, layers in self.notes.items()}

    def _quantization(self, name: str, layer: Layer, tensor: str) -> Quantization | None:
        if name in RECIPES:
            if (name, tensor) not in self.recipes:
                self.recipes[name, tensor] = of_recipe(name, tensor)
            return self.recipes[name, tensor]
        if name or self.formats is None:
            if name and name not in self.read:
                self.read[name] = named_scheme(name)
            scheme = self.read[name] if name else self.session
            assert scheme is not None, "a statistic without a scheme is refused where the session has none"
            form: Format | str = scheme.format
        else:
            form = self.formats.get(layer.name, "")
        if isinstance(form, str):
            return None
        if form.algorithm != "max":
            self.note(f"{chosen_note(form)} in statistics", layer)
        return of_numerics(form.weight, form.input, tensor)


def chosen_note(form: Format) -> str:
    """That a format is taken without what calibration chooses for it."""
    return f"what calibration chooses for {form.algorithm} is not applied"


class Sums:
    """The sums of one tensor of a layer at a step, for all statistics that are asked for."""

    def __init__(self, layer: Layer, tensor: str, stats: Iterable[TensorStat | QuantStat], schemes: Schemes) -> None:
        self.layer, self.tensor = layer, tensor
        every = list(dict.fromkeys(stats))
        self.plain = [stat for stat in every if isinstance(stat, TensorStat)]
        both = tensor in ("activation", "weight")
        self.blocks = {s: Blocks(s.block_size, s.dims, both) for s in self.plain if s.dims}
        self.asked = tuple(self.blocks)
        self.magnitudes = any(needs_magnitudes(stat.name) for stat in self.plain)
        self._total = TensorSums([*self.blocks.values()], magnitudes=self.magnitudes)
        self.there: DeviceSums | None = None  # what a GPU holds, `_total` lacks and `gather` brings
        self._schemes, self._lock = schemes, threading.Lock()
        found = ((stat, schemes.of(stat, layer, tensor)) for stat in every if isinstance(stat, QuantStat))
        self.quantized = [(stat, under) for stat, under in found if under is not None]
        self.lost: dict[Under, LossSums] = {under: LossSums() for _, under in self.quantized}

    def add(self, seen: Seen) -> None:
        """Add a tensor, of any thread."""
        with self._lock:
            for stat, blocks in [*self.blocks.items()]:
                if blocks.problem(seen.bits.shape):
                    self._schemes.note(f"{stat.label(self.tensor)}: a block does not divide {self.tensor}", self.layer)
                    self.leave_out(stat)
            if self.plain:
                made = seen.sums(self._total.blocks, self.magnitudes)
                if isinstance(made, TensorSums):
                    self._total = self._total.merged(made)
                else:
                    self.there = self.there.merged(made) if self.there else made
            if seen.beyond:
                self._schemes.note(f"numbers of {self.tensor} beyond float32 are taken as its largest", self.layer)
            for under in self.lost:
                if seen.width(under.columnwise) % under.how.unit:
                    self._schemes.note(
                        f"{self.tensor} has no rows of whole blocks of {under.how.unit}, which a scheme needs",
                        self.layer,
                    )
                else:
                    self.lost[under] = self.lost[under].merged(seen.losses(under))

    @property
    def total(self) -> TensorSums:
        """All of it, on the host."""
        gather([self])
        return self._total

    @total.setter
    def total(self, total: TensorSums) -> None:
        self._total, self.there = total, None

    def leave_out(self, stat: TensorStat) -> None:
        """Do without a statistic whose blocks do not divide a tensor."""
        self._total = self._total.without(self.blocks.pop(stat))

    @property
    def seen(self) -> bool:
        return bool(self.total.numel) or any(lost.numel for lost in self.lost.values()) or not (self.plain or self.lost)

    def records(self, step: int) -> Iterator[Record]:
        """A record for each statistic; none if the tensor was not seen."""
        for stat in self.plain if self.total.numel else ():
            label = stat.label(self.tensor)
            if stat.name != HISTOGRAM and (stat in self.blocks or not stat.dims):
                yield self._record(step, label, statistic(self.total, label))
        for lossy, under in self.quantized:
            if self.lost[under].numel:
                value = loss(self.lost[under], lossy.name)
                most = EQUAL if lossy.name == "sqnr" and not math.isnan(value) else value
                yield self._record(step, lossy.label(self.tensor), min(value, most))

    @property
    def not_finite(self) -> int:
        """How many numbers were NaN or infinite."""
        return int(max(self.total.numel - self.total.finite, *(lost.not_finite for lost in self.lost.values()), 0))

    def counts(self, step: int) -> Iterator[Magnitudes]:
        if self.total.numel and any(stat.name == HISTOGRAM for stat in self.plain):
            counts = tuple(sorted(octaves(self.total).items()))
            rest = self.total.finite - sum(count for _, count in counts)
            yield Magnitudes(step, self.layer.name, self.tensor, counts, rest, tuple(self._ranges()))

    def _ranges(self) -> Iterator[CodeRange]:
        """What each scheme reaches, by the scales that it had."""
        for under, stat in {under: stat for stat, under in self.quantized if not under.columnwise}.items():
            least, lost, how = under.how.least, self.lost[under], under.how
            if least is not None and lost.scales:
                static = (under.amax or how.amax or None) if how.static else None
                scheme = stat.scheme or (self._schemes.session.name if self._schemes.session else "")
                yield CodeRange(scheme, least / 2 * lost.least_scale, least / 2 * lost.largest_scale, static)

    def _record(self, step: int, label: str, value: float) -> Record:
        told = value if math.isfinite(value) else None
        return Record(step, self.layer.name, self.layer.role, self.tensor, label, told)


def gather(every: Iterable[Sums]) -> None:
    """Bring what GPUs hold of all these to the host, in one copy for each GPU."""
    waiting = [(sums, sums.there) for sums in every if sums.there]
    brought = on_device.to_host([there for _, there in waiting])
    for (sums, _), made in zip(waiting, brought, strict=True):
        sums.total = sums._total.merged(made)


class Seen:
    """One tensor and what was computed of it, for all layers that read it. `mask`: rows that count."""

    def __init__(self, tensor: Tensor, mask: Tensor | None, conv: bool) -> None:
        self.tensor, self.mask, self.conv = tensor, mask, conv
        self.version = version_of(tensor)
        own = str(tensor.dtype).removeprefix("torch.")
        self.dtype = own if own in FLOATS else "float32"
        self._summed: dict[tuple[tuple[Blocks, ...], bool], TensorSums | DeviceSums] = {}
        self._lost: dict[Under, LossSums] = {}

    @cached_property
    def bits(self) -> Array:
        """The values that count, copied to the host where something is computed there."""
        values = self.tensor if self.mask is None else self.tensor[self.mask.to(self.tensor.device) != 0]
        values = values.flatten(1) if self.conv and values.ndim > 2 else values
        return storage(values)[0]

    @cached_property
    def beyond(self) -> bool:
        """Whether a finite number does not fit float32."""
        values = self.tensor
        return values.dtype.itemsize > 4 and bool((values.abs() > LARGEST).logical_and(values.isfinite()).any())

    def is_of(self, tensor: Tensor, mask: Tensor | None, conv: bool) -> bool:
        """Whether this is the same tensor with the same values; its memory is held, so that no other has it."""
        mine = self.tensor
        same = mine.data_ptr() == tensor.data_ptr() and mine.stride() == tensor.stride() and self.mask is mask
        now = (tensor.shape, tensor.dtype, version_of(tensor), conv)
        return same and self.version is not None and (mine.shape, mine.dtype, self.version, self.conv) == now

    def width(self, columnwise: bool) -> int:
        """The width of a row, or of one of the transpose."""
        across = self.bits.shape[-1] if self.bits.ndim else 1
        return self.bits.size // across if columnwise else across

    def sums(self, blocks: tuple[Blocks, ...], magnitudes: bool) -> TensorSums | DeviceSums:
        if (blocks, magnitudes) not in self._summed:
            self._summed[blocks, magnitudes] = self._sums(blocks, magnitudes)
        return self._summed[blocks, magnitudes]

    def _sums(self, blocks: tuple[Blocks, ...], magnitudes: bool) -> TensorSums | DeviceSums:
        if not blocks and on_device.on_device(self.tensor):
            return DeviceSums.of(summed(self.tensor), self.mask, magnitudes)
        made = TensorSums(blocks, magnitudes=magnitudes)
        made.add(self.bits, self.dtype)
        return made

    def losses(self, under: Under) -> LossSums:
        if under not in self._lost:
            made = losses(self.bits, self.dtype, under.how, amax=under.amax, columnwise=under.columnwise)
            self._lost[under] = made
        return self._lost[under]


def storage(tensor: Tensor) -> tuple[Array, str]:
    """The bits of a tensor on the CPU, and their dtype, that of `summed`."""
    own = summed(tensor.detach())
    dtype = str(own.dtype).removeprefix("torch.")
    return bits_of(own, dtype), dtype


def summed(tensor: Tensor) -> Tensor:
    """A tensor in a dtype that is summed: its own, else float32, whose largest is for all beyond it."""
    own = str(tensor.dtype).removeprefix("torch.")
    if own in FLOATS:
        return tensor
    narrow = tensor.float()
    if own == "float64":
        beyond = narrow.isinf() & tensor.isfinite()
        narrow = narrow.where(~beyond, LARGEST * tensor.sign().float())
    return narrow


def version_of(tensor: Tensor) -> int | None:
    """What changes with each write in place; None where torch does not count them."""
    return None if tensor.is_inference() else tensor._version


class Dumped(Protocol):
    """Where tensors are written."""

    def add(self, layer: Layer, name: str, tensor: Tensor, options: Options, schemes: Schemes) -> None: ...


class Collector:
    """The sums of one step, for the routes that are due; `dumps` takes the tensors that DumpTensors names."""

    def __init__(self, due: Mapping[str, Sequence[Route]], schemes: Schemes, dumps: Dumped | None = None) -> None:
        self._last: dict[str, Seen] = {}  # of each kind, which several layers read one after the other
        self._schemes, self._dumps = schemes, dumps
        self._dumped = {
            (name, route.tensor): route.options
            for name, routes in due.items()
            for route in routes
            if route.feature == "DumpTensors" and not route.own
        }
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
        return frozenset(tensor for name, tensor in (*self.sums, *self._dumped) if name == layer)

    def see(self, layer: Layer, name: str, tensor: Tensor, mask: Tensor | None) -> None:
        """Add a tensor, which is only read; `mask`: the rows of its first two axes that count."""
        if not tensor.numel():
            return
        if self._dumps and (layer.name, name) in self._dumped:
            self._dumps.add(layer, name, tensor, self._dumped[layer.name, name], self._schemes)
        if (layer.name, name) not in self.sums:
            return
        conv = layer.kind == CONV and name in ("weight", "wgrad")
        seen = self._last.get(name)
        if seen is None or not seen.is_of(tensor, mask, conv):
            seen = self._last[name] = Seen(tensor, mask, conv)
        self.sums[layer.name, name].add(seen)

    @property
    def unseen(self) -> Iterator[tuple[Layer, str]]:
        """Layers and tensors that were due and did not come."""
        for sums in self.sums.values():
            if not sums.seen:
                yield sums.layer, sums.tensor

    def not_finite(self, step: int) -> list[str]:
        """A note on the first tensor, in the model's order, that holds a NaN or an infinity."""
        for sums in self.sums.values():
            if count := sums.not_finite:
                of = number(count, "value")
                return [f"{of} of {sums.tensor} of {sums.layer.name} NaN or infinite at step {step}, the first seen"]
        return []

    def records(self, step: int) -> list[Record]:
        return [record for sums in self.sums.values() for record in sums.records(step)]

    def magnitudes(self, step: int) -> list[Magnitudes]:
        return [counts for sums in self.sums.values() for counts in sums.counts(step)]
