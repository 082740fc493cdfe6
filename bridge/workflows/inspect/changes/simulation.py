"""Simulate a scheme in a live model.

As in ModelOpt's fake-quantized model each matrix has scales and a pre-scale of its own; targets that join matrices make
some of them share one. Results of GEMMs and gradients stay as they are, and gradients go straight through: dgrad takes
the quantized weight, wgrad the quantized activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.values import Format, Site, TensorSpec
from bridge.quant.calibration import Calibration
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.clip import Clip
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.scheme import Scheme
from bridge.quant.smoothing import Smoothing
from bridge.tables.architectures.roles import load_roles
from bridge.workflows.inspect.changes.layer_changes import Make, Quantizer, Simulated, as_tensor
from bridge.workflows.inspect.collect import UNCALIBRATED, Schemes, chosen_note, storage
from bridge.workflows.inspect.layers import Layer, clean, expert_name
from bridge.workflows.inspect.statistics.coding import fake_quantized
from bridge.workflows.inspect.statistics.quantization import Quantization, of_numerics

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.sources.live_models.checkpoint_names import LiveSlice

PLAIN_KV = "the KV cache runs unquantized"
AS_WRITTEN = (
    "a written model: its weights run as they are, and have losses of a second quantization; its inputs run under"
)


@dataclass(frozen=True, eq=False)
class CalibratedWeight:
    """What the codes of a weight (out, in) stand for that calibration smoothed or whose blocks it clipped.

    `clip` (out, blocks): the part of its amax that the scale of a block covers; None for all of it.
    """

    layer: str
    form: Format
    calibration: Calibration
    clip: Array | None

    def __call__(self, weight: Tensor) -> Tensor:
        bits, dtype = storage(weight)
        scale: Array | None = None
        if self.form.prescales:
            smoothing = Smoothing(self.calibration, self.form, dtype, (self.layer,))
            bits, scale = smoothing.apply(self.layer, bits), smoothing.scale()
        if self.clip is None:
            values = fake_quantized(bits, dtype, Quantization(self.form.weight))
        else:
            clip = Clip(self.clip, dtype if self.form.algorithm == "awq_clip" else "float32")
            made = encode(bits, dtype, self.form.weight, clip=clip, name=self.layer)
            values = decode(made, self.form.weight, bits.shape)
        return as_tensor(values if scale is None else values * scale, weight)


def formats_of(
    scheme: Scheme, sites: Iterable[Site], model: Any, specs: Mapping[str, TensorSpec]
) -> dict[str, Format | str]:
    """The formats that conversions give the matrices of a model, or why they leave one, by names of live modules."""
    from bridge.sources.live_models.checkpoint_names import live_names

    origins, found = live_names(model, specs), dict[str, Format | str]()
    stacks = {name: len(tensor) for name, tensor in model.named_parameters() if tensor.ndim == 3}
    for site in sites:
        form = scheme.format_of(site)
        parts = origins[site.weight].parts if site.weight in origins and not site.keep else ()
        for name in {site.module, *(name for part in parts for name in _layer_names(part, stacks))}:
            before = found.setdefault(name, form)
            if before != form:
                found[name] = "its parts have several formats"
    return found


def _layer_names(part: LiveSlice, stacks: Mapping[str, int]) -> Iterator[str]:
    """The layers that have a part of a live tensor.  stacks: experts of each tensor that holds several."""
    module, _, parameter = clean(part.live).rpartition(".")
    if part.live not in stacks:
        yield module
        return
    for expert in range(stacks[part.live]) if part.expert is None else (part.expert,):
        yield expert_name(module, expert, parameter)


def formats_by_role(scheme: Scheme, layers: Iterable[Layer]) -> dict[str, Format | str]:
    """The same of a live model, where roles tell what conversions leave: heads and routers."""
    roles = load_roles().roles
    return {
        layer.name: next(
            (f"kept: {role}" for role in layer.roles if roles[role].kind in ("head", "router")), scheme.format
        )
        for layer in layers
    }


def simulated(
    layers: Iterable[Layer],
    formats: Mapping[str, Format | str],
    calibration: Calibration | None,
    schemes: Schemes,
) -> dict[str, Simulated]:
    """How a scheme quantizes the operands of each layer that it quantizes, by the layer's name.

    formats: of a layer, or why it stays as it is. What does not run as the scheme has it is noted.
    """
    found: dict[str, Simulated] = {}
    for layer in layers:
        form = formats.get(layer.name, "no matrix that is quantized")
        if isinstance(form, str):
            continue
        if layer.fixed:
            schemes.note(f"runs unquantized: {layer.fixed}", layer)
            continue
        own, form = _calibrated(layer, form, calibration, schemes)
        quantized: dict[str, Make] = {"weight": _weight(layer, form, own)}
        how = of_numerics(form.weight, form.input, "activation")
        if how is not None:
            quantized["activation"] = _input(layer, form, how, own, schemes)
        found[layer.name] = Simulated(layer, quantized)
    return found


def as_written(found: Mapping[str, Simulated], scheme: Scheme, schemes: Schemes) -> dict[str, Simulated]:
    """The same of a model whose weights are those of a directory that was written under the scheme."""
    kept = {}
    for name, own in found.items():
        inputs = {tensor: make for tensor, make in own.quantized.items() if tensor != "weight"}
        if inputs:
            schemes.note(f"{AS_WRITTEN} {scheme.name}", own.layer)
            kept[name] = replace(own, quantized=inputs)
    return kept


def _calibrated(
    layer: Layer, form: Format, calibration: Calibration | None, schemes: Schemes
) -> tuple[Calibration | None, Format]:
    """The calibration of a layer, and the part of its format that is applied."""
    known = calibration is not None and _has(calibration, layer.name, form)
    if form.algorithm != "max" and not known:
        schemes.note(chosen_note(form), layer)
        form = replace(form, algorithm="max")
        plain = calibration is not None and not _is_smoothed(calibration, layer.name)
        return (calibration if plain else None), form
    return calibration, form


def _has(calibration: Calibration, name: str, form: Format) -> bool:
    """Whether a calibration has what the algorithm of a format chose, of what is applied here."""
    if form.clipped and name not in calibration.weight_clip:
        return False
    return form.clipped if not form.prescales else _is_smoothed(calibration, name)


def _is_smoothed(calibration: Calibration, name: str) -> bool:
    return any(name in found for found in (calibration.pre_scale, calibration.smoothing_amax, calibration.awq_scale))


def _weight(layer: Layer, form: Format, calibration: Calibration | None) -> Make:
    if calibration is None or form.algorithm == "max":
        return Quantizer(Quantization(form.weight))
    return CalibratedWeight(
        layer.name, form, calibration, calibration.weight_clip[layer.name] if form.clipped else None
    )


def _input(
    layer: Layer, form: Format, how: Quantization, calibration: Calibration | None, schemes: Schemes
) -> Quantizer:
    amax = scale = None
    if calibration is not None and form.prescales:
        scale = Smoothing(calibration, form, "float32", (layer.name,)).scale()
    if how.static and not how.amax:
        known = calibration.input_amax.get(layer.name) if calibration else None
        amax = None if known is None else float(np.max(known))
        if amax is None:
            schemes.note(UNCALIBRATED, layer)
    return Quantizer(how, amax, scale)
