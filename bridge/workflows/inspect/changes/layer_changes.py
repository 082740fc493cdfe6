"""Decide what the GEMMs of each layer take at a step.

An operand is changed by a feature, or quantized as the session's scheme has it unless its GEMM is disabled, or as it
is. Results of GEMMs are changed by features only. Statistics of inputs are those before, of results those after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.dtypes import to_float32
from bridge.quant.codec.arrays import Array
from bridge.workflows.inspect.changes.gemms import ChangedGemms
from bridge.workflows.inspect.collect import Schemes, storage, version_of
from bridge.workflows.inspect.layers import Layer
from bridge.workflows.inspect.routes import TAKES, Route
from bridge.workflows.inspect.statistics.coding import fake_quantized
from bridge.workflows.inspect.statistics.quantization import CURRENT, Quantization, of_format, of_recipe

if TYPE_CHECKING:
    from torch import Tensor

DISABLING = ("DisableQuantizationGEMM", "DisableQuantizationLayer")
Make = Callable[["Tensor"], "Tensor"]  # another one of the same shape and dtype; does not write into what it gets
CHANGING = ("FakeQuant", "PerTensorScaling", *DISABLING)


@dataclass(frozen=True, eq=False)
class Quantizer:
    """What the codes of a matrix (rows, in) stand for, in its own dtype.

    `amax`: static; None takes that of the format, or of each tensor. `scale` (in,): the factor of the tensor before it
    is quantized, by which the values are divided.
    """

    how: Quantization
    amax: float | None = None
    scale: Array | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.scale is None:
            return as_tensor(fake_quantized(*storage(tensor), self.how, self.amax), tensor)
        scaled = np.ascontiguousarray(to_float32(*storage(tensor)) * self.scale)
        return as_tensor(fake_quantized(scaled, "float32", self.how, self.amax) / self.scale, tensor)


def as_tensor(values: Array, like: Tensor) -> Tensor:
    """Float32 values as a tensor of another's dtype, where that one lies."""
    import torch

    return torch.from_numpy(values).to(like.device, like.dtype)


@dataclass
class LayerChanges:
    """What the operands and results of one layer's GEMMs become at one step: the `change` of `ChangedGemms`.

    `modified`: by (GEMM, tensor), of features; they win. `disabled`: GEMMs that take no tensor of `quantized`, which
    is by tensor, of the session's scheme. A weight is made once a step, and again after a write in place.
    """

    layer: Layer
    modified: dict[tuple[str, str], Make] = field(default_factory=dict)
    disabled: set[str] = field(default_factory=set)
    quantized: Mapping[str, Make] = field(default_factory=dict)
    ran: bool = False
    _weights: dict[int, tuple[Tensor, int, Tensor]] = field(default_factory=dict, repr=False)

    def make_of(self, gemm: str, name: str) -> Make | None:
        """What changes an operand or a result; None leaves it as it is."""
        if (gemm, name) in self.modified:
            return self.modified[gemm, name]
        return None if gemm in self.disabled or name not in TAKES[gemm][:2] else self.quantized.get(name)

    @property
    def needed(self) -> bool:
        """Whether anything is changed, so that the layer cannot run as it does."""
        return any(self.make_of(gemm, name) for gemm, names in TAKES.items() for name in names)

    def __call__(self, gemm: str, name: str, tensor: Tensor) -> Tensor:
        self.ran = True
        make = self.make_of(gemm, name)
        if make is None or not tensor.numel():
            return tensor
        return self._weight(make, tensor) if name == "weight" else make(tensor)

    def _weight(self, make: Make, weight: Tensor) -> Tensor:
        """The weight as `make` has it, kept for the other GEMM and the forwards that follow."""
        version, kept = version_of(weight), self._weights.get(id(make))
        if kept and version is not None and kept[1] == version and _is_same(kept[0], weight):
            return kept[2]
        made = make(weight)
        if version is not None:
            self._weights[id(make)] = weight, version, made  # holds the memory, so that no other tensor has it
        return made


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(), other.shape, other.stride(), other.dtype
    )  # fmt: skip


@dataclass(frozen=True)
class Simulated:
    """How the session's scheme quantizes the operands of one layer: activation, weight."""

    layer: Layer
    quantized: Mapping[str, Make]


class Changes:
    """The layers of a live model whose GEMMs take something else at the current step."""

    def __init__(
        self,
        model: Any,
        schemes: Schemes,
        simulated: Mapping[str, Simulated],
        more: Callable[[LayerChanges], None] = lambda _: None,
    ) -> None:
        """more: adds what others change in a layer."""
        self._model, self._schemes, self._simulated, self._more = model, schemes, simulated, more
        self._attached: list[tuple[LayerChanges, ChangedGemms]] = []

    def attach(self, due: Mapping[str, Sequence[Route]]) -> None:
        """Change the layers of routes that are due, and those of the scheme; all others have their own forward."""
        self.detach()
        for name in dict.fromkeys((*self._simulated, *due)):
            changes = self.of(name, due.get(name, ()))
            if changes.needed:
                module = self._model.get_submodule(changes.layer.module)
                self._attached.append((changes, ChangedGemms(module, changes)))

    def of(self, name: str, routes: Sequence[Route]) -> LayerChanges:
        """The changes of a layer for routes that are due."""
        simulated = self._simulated.get(name)
        layer = simulated.layer if simulated else routes[0].layer
        changes = LayerChanges(layer, quantized=simulated.quantized if simulated else {})
        add_features(changes, routes, self._schemes)
        self._more(changes)
        return changes

    @property
    def some(self) -> bool:
        """Whether a layer is changed."""
        return bool(self._attached)

    @property
    def unused(self) -> Iterable[Layer]:
        """Layers that were to be changed and did not run."""
        return [changes.layer for changes, _ in self._attached if not changes.ran]

    def detach(self) -> None:
        """Give all layers their own forwards back."""
        for _, gemms in self._attached:
            gemms.detach()
        self._attached.clear()


def add_features(changes: LayerChanges, routes: Iterable[Route], schemes: Schemes, *, quantizes: bool = False) -> None:
    """Add what the features of this package change. `quantizes`: the layer quantizes its inputs by itself."""
    fake: dict[tuple[str, str, str], Quantizer | None] = {}
    scaled: dict[str, Quantizer] = {}
    named: dict[str, set[str]] = {}
    for route in routes:
        place, options = (route.gemm, route.tensor), route.options
        if route.own or route.feature not in CHANGING:
            continue
        if route.feature in DISABLING:
            changes.disabled.add(route.gemm)
            if not (quantizes or changes.quantized):
                schemes.note(f"{route.feature} has no effect: nothing is quantized there (quant=)", changes.layer)
        elif route.feature == "FakeQuant":
            changes.disabled.add(route.gemm)  # as in TransformerEngine: the other operand stays in high precision
            named.setdefault(route.gemm, set()).add(route.tensor)
            key = (options.quant_format, options.scheme, route.tensor)
            if route.tensor and key not in fake:
                fake[key] = _fake_quant(*key, changes.layer, schemes)
            if route.tensor and (made := fake[key]):
                changes.modified[place] = made
        elif not quantizes and "activation" not in changes.quantized:
            schemes.note(
                "PerTensorScaling replaces no static scale: quant= leaves the inputs as they are", changes.layer
            )
        else:
            made = scaled.setdefault(route.tensor, Quantizer(of_recipe(CURRENT, route.tensor)))
            changes.modified[place] = made
    for gemm, tensors in named.items():
        if len(tensors & {*TAKES[gemm][:2]}) == 1:
            (one,) = tensors & {*TAKES[gemm][:2]}
            schemes.note(
                f"FakeQuant changes {one} of {gemm} alone, and the other operand is not quantized", changes.layer
            )


def _fake_quant(quant_format: str, scheme: str, tensor: str, layer: Layer, schemes: Schemes) -> Quantizer | None:
    """What FakeQuant makes of a tensor; None where its scheme leaves it as it is."""
    if quant_format:
        return Quantizer(of_format(quant_format))
    under = schemes.under(scheme, layer, tensor)
    return Quantizer(under.how, under.amax) if under else None
