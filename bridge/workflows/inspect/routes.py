"""Routes: features for tensors of layers, with their schedules.

A config language makes them; here is only what a session reads of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from bridge.workflows.inspect.layers import Layer

GEMMS = ("fprop", "dgrad", "wgrad")
INPUTS = ("activation", "weight", "gradient")
TENSORS = (*INPUTS, "output", "dgrad", "wgrad")
TAKES = {  # GEMM -> the tensors that belong to it: its two inputs and its output
    "fprop": ("activation", "weight", "output"),
    "dgrad": ("gradient", "weight", "dgrad"),
    "wgrad": ("gradient", "activation", "wgrad"),
}
GEMMS_OF = {  # tensor -> the GEMMs that take its rows and its columns
    "activation": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "gradient": ("dgrad", "wgrad"),
}  # fmt: skip
Interval = tuple[int, int | None]  # first and last step, both included; None: without an end
BLOCKWISE = "max_blockwise_dynamic_range"
QUANT_STATS = (
    "underflows%", "overflows%", "mse", "sqnr", "cosine", "norm_ratio", "scale_min", "scale_max", "scale_std",
    "scale_underflows%", "max_error",
)  # fmt: skip
# TransformerEngine's names: its `scale_inv` is the scale that codes are multiplied by.
ALIASES = {f"scale_inv_{end}": f"scale_{end}" for end in ("min", "max", "std")}
COLUMNWISE = "_columnwise"
_BOTH_WAYS = ("activation", "weight")  # tensors that a layer also multiplies transposed


@dataclass(frozen=True)
class Schedule:
    """Due at the multiples of `freq` in any of the intervals; `freq` counts from step 0."""

    freq: int = 1
    intervals: tuple[Interval, ...] = ((0, None),)

    def due(self, step: int) -> bool:
        """Whether the feature runs at this step.

        >>> [step for step in range(9) if Schedule(2, ((3, 6),)).due(step)]
        [4, 6]
        """
        return step % self.freq == 0 and any(first <= step and _before(step, last) for first, last in self.intervals)

    def next_due(self, step: int) -> int | None:
        """The first step after `step` at which the feature runs; None if there is none.

        >>> Schedule(2, ((3, 6),)).next_due(-1), Schedule(2, ((3, 6),)).next_due(6)
        (4, None)
        """
        firsts = ((_multiple(max(step + 1, first), self.freq), last) for first, last in self.intervals)
        return min((first for first, last in firsts if _before(first, last)), default=None)

    def meets(self, other: Schedule) -> bool:
        """Whether both are due at the same step, at least once.

        >>> Schedule(2).meets(Schedule(3)), Schedule(4, ((1, 9),)).meets(Schedule(6, ((1, 9),)))
        (True, False)
        """
        every = math.lcm(self.freq, other.freq)
        return any(
            _before(both := _multiple(max(a, b), every), a_end) and _before(both, b_end)
            for a, a_end in self.intervals
            for b, b_end in other.intervals
        )


def _multiple(step: int, freq: int) -> int:
    """The first multiple of `freq` from `step` on."""
    return -(-step // freq) * freq


def _before(step: int, last: int | None) -> bool:
    return last is None or step <= last


@dataclass(frozen=True)
class TensorStat:
    """A statistic of a tensor as it is; `block_size` and `dims` are those of `max_blockwise_dynamic_range`."""

    name: str
    block_size: int = 0
    dims: int = 0

    def label(self, tensor: str = "") -> str:
        """The name in results, which is TransformerEngine's.

        >>> TensorStat(BLOCKWISE, 32, 1).label("weight")
        'max_blockwise_dynamic_range_block_size_32_dims_1_max_over_orientations'
        """
        if not self.dims:
            return self.name
        both = "_max_over_orientations" if tensor in _BOTH_WAYS else ""
        return f"{self.name}_block_size_{self.block_size}_dims_{self.dims}{both}"


@dataclass(frozen=True)
class QuantStat:
    """A statistic of quantization. `scheme`: a scheme or one of `RECIPES`; "" takes the session's.

    `written`: the name as the config has it, without the scheme and `_columnwise`.
    """

    name: str
    scheme: str
    columnwise: bool
    written: str

    def label(self, _tensor: str = "") -> str:
        """The name in results.

        >>> QuantStat("scale_min", "mxfp8", True, "scale_inv_min").label()
        'mxfp8_scale_inv_min_columnwise'
        """
        prefix = f"{self.scheme}_" if self.scheme else ""
        return prefix + self.written + COLUMNWISE * self.columnwise


@dataclass(frozen=True)
class Options:
    """The options of a feature for one tensor and GEMM. `given`: as written, merged, for classes of the caller's."""

    stats: tuple[TensorStat | QuantStat, ...] = ()
    scheme: str = ""
    quant_format: str = ""
    high_precision_tensor: bool = False
    quantized_tensor: bool = False
    given: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @classmethod
    def as_given(cls, given: Mapping[str, Any] | None) -> Options:
        """Options that only a class of the caller's reads; what the caller's dict holds later does not matter."""
        return cls(given=MappingProxyType(copy.deepcopy(dict(given or {}))))

    def config(self) -> dict[str, Any]:
        """A copy of `given`, which a feature class receives as `config`."""
        return copy.deepcopy(dict(self.given))


@dataclass(frozen=True)
class Use:
    """A feature for one tensor, GEMM or both; "" for every one of them."""

    tensor: str
    gemm: str
    options: Options
    schedule: Schedule


@dataclass(frozen=True)
class Route(Use):
    """The use of a section's feature for a layer."""

    layer: Layer
    section: str
    feature: str
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
