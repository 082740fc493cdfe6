"""Collect statistics: ModelOpt's by checkpoint module, and tokens of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np

from bridge.calibration.algorithms.clips import settle_clip
from bridge.calibration.job import CalibrationJob
from bridge.calibration.policies import settle
from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.schedule import Quantizers
from bridge.core.values import Site, TensorSpec
from bridge.quant.calibration import Applied
from bridge.quant.codec.scales import SMALLEST
from bridge.quant.schemes.scheme import is_measured


@dataclass(frozen=True)
class FakeModel:
    """ModelOpt's fake-quantized model and its quantizers. `scales` are the pre-scales by live module.

    `tokens`: the count of each expert, by the checkpoint name of a layer's experts. `clips`: of the blocks of a weight,
    by live module.
    """

    model: Any
    quantizers: Quantizers
    scales: dict[str, Any]
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    clips: dict[str, np.ndarray] = field(default_factory=dict)


class ExpertTokens:
    """`tokens`: checkpoint name of a layer's experts -> tokens of each, over the first run of the data through it.

    transformers has the experts of a layer in one module, which is called with every token's experts. A module that is
    called with other arguments is not counted.
    """

    def __init__(self, bindings: Iterable[QuantizerBinding]) -> None:
        self.tokens: dict[str, np.ndarray] = {}
        experts = (one for one in bindings if one.site.stacked or one.expert is not None)
        self._names = {one.module: one.site.experts for one in experts}  # live module -> checkpoint name

    def first(self, loop: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return the loop with its first run through each layer counted; an algorithm may run it more than once."""

        def run(model: Any) -> None:
            with ExitStack() as hooks:
                for name, module in model.named_modules():
                    if name in self._names and self._names[name] not in self.tokens:
                        count = partial(self._count, self._names[name])
                        hooks.enter_context(module.register_forward_pre_hook(count, with_kwargs=True))
                loop(model)

        return run

    def _count(self, name: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        integers = ("torch.int64", "torch.int32")
        chosen = next((x for x in (*args, *kwargs.values()) if str(getattr(x, "dtype", "")) in integers), None)
        if chosen is None:
            return
        size = int(next(module.parameters()).shape[0])
        counts = np.bincount(chosen.detach().cpu().numpy().reshape(-1), minlength=size)[:size]
        self.tokens[name] = self.tokens.get(name, np.zeros(size, np.float32)) + counts.astype(np.float32)


def raise_inputs(fake: FakeModel, least: float) -> list[Applied]:
    """Raise the amax of inputs to `least`, in ModelOpt's dtype, and return where it was smaller."""
    small = []
    for binding in fake.quantizers.bindings:
        amax = None if binding.format.input is None else _amax(fake.model, binding.input_quantizer)
        if amax is not None and amax < least:
            small.append(binding)
    for binding in small:
        quantizer = fake.model.get_submodule(binding.input_quantizer)
        quantizer.amax = quantizer.amax.clamp(min=least)
    return [Applied(binding.site.module, "input amax", f"below {least:g}", "floor", least) for binding in small]


Statistics = dict[str, dict[str, Any]]  # kind -> checkpoint module -> float32, or codes in memory or in a file
CODES, SCALES = MATRICES = ("weight_codes", "block_scales")
KINDS = ("input_amax", "smoothing_amax", "awq_scale", "pre_scale", "k_amax", "v_amax", "weight_clip", "weight_amax",
         "scale_factor", "expert_tokens", *MATRICES)  # fmt: skip
WATCHED = "watched"  # the kind of what a watch of a walk took, under names of its own


def collect(fake: FakeModel) -> Statistics:
    """Return what the quantizers of a model, or of a part of it, saw; what no token reached is left out."""
    seen: Statistics = {kind: {} for kind in KINDS}
    scheme = fake.quantizers.scheme
    for binding in fake.quantizers.bindings:
        name, form = binding.site.module, binding.format
        if is_measured(form.input):
            _keep_largest(seen["input_amax"], name, _amax(fake.model, binding.input_quantizer))
        if form.prescales and (kept := _pre_scale(fake, binding)):
            seen[kept[0]][name] = kept[1]
        if form.clipped and (clip := fake.clips.get(binding.module)) is not None:
            seen["weight_clip"][name] = clip[slice(*(binding.rows or (None,)))]
    for letter in "kv" if is_measured(scheme.kv) else "":
        for live, ours in fake.quantizers.attention.items():
            _keep_largest(seen[f"{letter}_amax"], ours, _amax(fake.model, f"{live}.{letter}_bmm_quantizer"))
    seen["expert_tokens"] = dict(fake.tokens)
    return seen


def merge(seen: Statistics, more: Statistics) -> None:
    """Add the statistics of another part of the model; a site that lies in both has the larger amax."""
    for kind, arrays in more.items():
        for name, array in arrays.items():
            if kind in ("input_amax", "k_amax", "v_amax"):
                _keep_largest(seen[kind], name, float(array))
            else:
                seen[kind][name] = array


def _keep_largest(values: dict[str, np.ndarray], name: str, value: float | None) -> None:
    if value is not None:
        largest = max((float(values[name]), value)) if name in values else value
        values[name] = np.asarray(largest, np.float32)


def settle_statistics(
    seen: Statistics, quantizers: Quantizers, job: CalibrationJob
) -> tuple[Statistics, list[Applied]]:
    """Return usable amax and pre-scales, and the policies that were applied.

    An unusable input amax of modules that the job does not need is left out.

    Raises:
        CalibrationError: a policy forbids a statistic.
    """
    raw: dict[str, float | None] = {}
    bounds: dict[str, float] = {}
    applied: list[Applied] = []
    arrays: Statistics = {kind: dict(seen[kind]) for kind in KINDS}
    scheme, specs = job.scheme, job.source.specs
    for binding in quantizers.bindings:
        name, form = binding.site.module, binding.format
        if is_measured(form.input):
            bounds[name] = form.input.maxbound
            raw[name] = _value(seen["input_amax"].get(name))
        if form.prescales and not any(name in seen[kind] for kind in ("smoothing_amax", "awq_scale", "pre_scale")):
            applied.append(Applied(name, "pre-scale", "never seen", "ones", 1.0))
            arrays["pre_scale"][name] = np.ones(_width(specs[binding.site.weight], binding.site), np.float32)
        if form.clipped:
            arrays["weight_clip"][name], used = settle_clip(name, seen, _blocks(specs, binding))
            applied += used
    sites = [binding.site for binding in quantizers.bindings]
    arrays["input_amax"], used = settle(raw, "input amax", sites, bounds, scheme.policies, job.needed)
    applied += used
    for letter in "kv" if is_measured(scheme.kv) else "":
        amax = {name: _value(seen[f"{letter}_amax"].get(name)) for name in quantizers.attention.values()}
        full = dict.fromkeys(amax, scheme.kv.maxbound if scheme.kv else 1.0)
        arrays[f"{letter}_amax"], used = settle(amax, f"{letter} amax", (), full, scheme.policies)
        applied += used
    return arrays, applied


def _value(array: np.ndarray | None) -> float | None:
    return None if array is None else float(array)


def _blocks(specs: Mapping[str, TensorSpec], binding: QuantizerBinding) -> tuple[int, int]:
    """The grid (out, blocks) of a weight."""
    spec, in_ = specs[binding.site.weight], _width(specs[binding.site.weight], binding.site)
    return prod(spec.shape) // in_, -(-in_ // binding.format.weight[0].block[-1])


def _width(spec: TensorSpec, site: Site) -> int:
    return spec.shape[0 if site.layout == "in_out" else 1]


def _amax(model: Any, quantizer: str) -> float | None:
    value = getattr(model.get_submodule(quantizer), "_amax", None)
    if value is None:
        return None
    largest = float(value.float().max())
    return 0.0 if largest <= SMALLEST["bfloat16"] else largest  # `smoothable` sets zero inputs to the smallest


def _pre_scale(fake: FakeModel, binding: QuantizerBinding) -> tuple[str, np.ndarray] | None:
    """Return the kind of a module's pre-scale and its values; None if no token arrived."""
    module = fake.model.get_submodule(binding.module)
    if binding.format.algorithm in ("awq", "awq_full"):
        scale, kind = getattr(getattr(module, "awq_lite", None), "best_scale", None), "awq_scale"
    elif dict(fake.quantizers.scheme.options).get("alpha", 1.0) == 1.0:
        scale, kind = getattr(module.input_quantizer, "_amax_for_smoothing", None), "smoothing_amax"
    else:
        scale, kind = fake.scales.get(binding.module), "pre_scale"
    return None if scale is None else (kind, scale.float().cpu().reshape(-1).numpy().copy())


def weight_amax(module: Any, layout: str) -> Any:
    """Return max |w| of each `in`, before ModelOpt smooths the weight (and turns a Conv1D's [in, out] around)."""
    return module.weight.detach().abs().amax(dim=1 if layout == "in_out" else 0)


def smoothable(loop: Callable[[Any], None], modules: Iterable[str]) -> Callable[[Any], None]:
    """Let `loop` give the input amax of `modules` a shape and a least value that ModelOpt can smooth with.

    With an alpha below 1 and a zero column of the weight, `smoothquant` of nvidia-modelopt 0.47 masks a vector with an
    amax of two axes, an IndexError; if the input is zero, too, its scale is 0 / 0. The shape changes no scale.
    """

    def run(model: Any) -> None:
        loop(model)
        for name in modules:
            calibrator = model.get_submodule(name).input_quantizer._calibrator
            if (amax := calibrator._calib_amax) is not None:
                dead = (amax == 0) & (weight_amax(model.get_submodule(name), "out_in") == 0)
                least = SMALLEST[str(amax.dtype).removeprefix("torch.")]
                calibrator._calib_amax = amax.masked_fill(dead, least).reshape(-1)

    return run


def isolate(root: Any) -> None:
    """Keep ModelOpt's statistics in this process, although the caller may have a process group.

    ModelOpt would take the mean of AWQ's scales over all processes, and wait forever for one that calibrates nothing or
    whose data reach other experts. `walk.workers.join` joins those of workers.
    """
    for module in root.modules():
        if (state := getattr(module, "_parallel_state", None)) is not None:
            state.data_parallel_group.group = -1


def smoothquant_scales(fake: Any, before: Mapping[str, Any], alpha: float) -> dict[str, Any]:
    """Compute SmoothQuant's float32 pre-scales as ModelOpt does: it keeps them only in the model's dtype."""
    scales = {}
    for name, weight in before.items():
        amax = getattr(fake.get_submodule(name).input_quantizer, "_amax_for_smoothing", None)
        if amax is None:
            continue
        seen = amax.float().reshape(-1).to(weight.device)
        scale = weight.pow(1 - alpha) / seen.pow(alpha)
        if scale.min() <= 2.0**-31:
            scale[seen <= 2.0**-31] = 1
        scales[name] = scale.clamp(min=1e-4, max=1e4)
    return scales
