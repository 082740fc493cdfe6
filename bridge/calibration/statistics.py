"""Statistics that ModelOpt's quantizers hold, by checkpoint module, settled by policy; never imports ModelOpt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bridge.quant.calibration import Applied
from bridge.quant.policies import settle
from bridge.quant.quantizers import Wire
from bridge.quant.scales import LEAST
from bridge.quant.scheme import Scheme, is_static


@dataclass(frozen=True)
class Twin:
    """ModelOpt's fake-quantized model and how our sites lie in it. `scales` are the pre-scales by live module.

    `tokens`: what each expert got, by the checkpoint name of a layer's experts.
    """

    model: Any
    wires: tuple[Wire, ...]
    attention: dict[str, str]  # live -> checkpoint
    scales: dict[str, Any]
    tokens: dict[str, np.ndarray] = field(default_factory=dict)


def raise_inputs(twin: Twin, least: float) -> list[Applied]:
    """Raise the amax of inputs to `least` where it is smaller, in the dtype that ModelOpt keeps it in; says where."""
    small = []
    for wire in twin.wires:
        amax = None if wire.format.input is None else _amax(twin.model, wire.input_quantizer)
        small += [wire] if amax is not None and amax < least else []
    for wire in small:
        quantizer = twin.model.get_submodule(wire.input_quantizer)
        quantizer.amax = quantizer.amax.clamp(min=least)
    return [Applied(wire.site.module, "input amax", f"below {least:g}", "floor", least) for wire in small]


def read_statistics(twin: Twin, scheme: Scheme) -> tuple[dict[str, dict[str, np.ndarray]], list[Applied]]:
    """Amax and pre-scales by kind and module, and the policies that were applied to get them.

    Raises:
        CalibrationError: a policy says that a statistic cannot be used.
    """
    raw: dict[str, float | None] = {}
    bounds: dict[str, float] = {}
    applied: list[Applied] = []
    arrays: dict[str, dict[str, np.ndarray]] = {"smoothing_amax": {}, "awq_scale": {}, "pre_scale": {}}
    arrays["expert_tokens"] = twin.tokens
    for wire in twin.wires:
        name, form = wire.site.module, wire.format
        if form.input is not None and is_static(form.input):
            bounds[name] = form.input.maxbound
            values = [v for v in (raw.get(name), _amax(twin.model, wire.input_quantizer)) if v is not None]
            raw[name] = max(values, default=None)
        if form.prescales:
            kind, array = _pre_scale(twin, wire, scheme)
            if kind == "":
                applied.append(Applied(name, "pre-scale", "never seen", "ones", 1.0))
            arrays[kind or "pre_scale"][name] = array
    sites = [wire.site for wire in twin.wires]
    arrays["input_amax"], used = settle(raw, "input amax", sites, bounds, scheme.policies)
    applied += used
    for letter in "kv" if scheme.kv is not None and is_static(scheme.kv) else "":
        found = {ours: _amax(twin.model, f"{live}.{letter}_bmm_quantizer") for live, ours in twin.attention.items()}
        full = dict.fromkeys(found, scheme.kv.maxbound if scheme.kv else 1.0)
        arrays[f"{letter}_amax"], used = settle(found, f"{letter} amax", (), full, scheme.policies)
        applied += used
    return arrays, applied


def _amax(model: Any, quantizer: str) -> float | None:
    value = getattr(model.get_submodule(quantizer), "_amax", None)
    if value is None:
        return None
    largest = float(value.float().max())
    return 0.0 if largest <= LEAST["bfloat16"] else largest  # what `smoothable` leaves of an input that is zero


def _pre_scale(twin: Twin, wire: Wire, scheme: Scheme) -> tuple[str, np.ndarray]:
    """The kind of a module's pre-scale and its values; kind "" and ones where no token arrived."""
    module = twin.model.get_submodule(wire.module)
    if wire.format.algorithm == "awq":
        found, kind = getattr(getattr(module, "awq_lite", None), "best_scale", None), "awq_scale"
    elif dict(scheme.options).get("alpha", 1.0) == 1.0:
        found, kind = getattr(module.input_quantizer, "_amax_for_smoothing", None), "smoothing_amax"
    else:
        found, kind = twin.scales.get(wire.module), "pre_scale"
    if found is None:
        return "", np.ones(module.weight.shape[1], np.float32)
    return kind, found.float().cpu().reshape(-1).numpy().copy()


def weight_amax(module: Any, layout: str) -> Any:
    """max |w| of each `in`, to be taken before ModelOpt smooths the weight (and turns a Conv1D's [in, out] around)."""
    return module.weight.detach().abs().amax(dim=1 if layout == "in_out" else 0)


def smoothable(model: Any, modules: Iterable[str]) -> None:
    """Give the collected input amax of `modules` the shape, and a zero the least value, that ModelOpt can smooth with.

    With an alpha below 1, where a column of the weight is zero, `smoothquant` of nvidia-modelopt 0.47 masks a vector
    with an amax of two axes, an IndexError; where the input is zero, too, its scale is 0 / 0. The shape changes
    no scale.
    """
    for name in modules:
        calibrator = model.get_submodule(name).input_quantizer._calibrator
        if (amax := calibrator._calib_amax) is not None:
            dead = (amax == 0) & (weight_amax(model.get_submodule(name), "out_in") == 0)
            calibrator._calib_amax = amax.masked_fill(dead, LEAST[str(amax.dtype).removeprefix("torch.")]).reshape(-1)


def smoothquant_scales(twin: Any, before: Mapping[str, Any], alpha: float) -> dict[str, Any]:
    """SmoothQuant's float32 pre-scales as ModelOpt computes them: it keeps only their rounding to the model's dtype."""
    scales = {}
    for name, weight in before.items():
        amax = getattr(twin.get_submodule(name).input_quantizer, "_amax_for_smoothing", None)
        if amax is None:
            continue
        seen = amax.float().reshape(-1).to(weight.device)
        scale = weight.pow(1 - alpha) / seen.pow(alpha)
        if scale.min() <= 2.0**-31:
            scale[seen <= 2.0**-31] = 1
        scales[name] = scale.clamp(min=1e-4, max=1e4)
    return scales
