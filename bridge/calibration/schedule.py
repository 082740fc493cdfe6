"""ModelOpt's algorithms: their order, arguments, and runs of the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.calibration.algorithms.clips import rows_at_once
from bridge.calibration.quantizers import QuantizerBinding, calibrator
from bridge.core.values import Format
from bridge.quant.schemes.grammar import ALGORITHMS, HEADROOM
from bridge.quant.schemes.scheme import Scheme, is_calibrated, is_measured

# Runs of the whole data, in the order of the algorithms: first those that leave the weights as they are, last GPTQ.
PASSES = {
    "max": 1, HEADROOM: 1, "mse": 1, "awq_clip": 1, "smoothquant": 1, "awq": 2, "awq_full": 3, "local_hessian": 2,
    "gptq": 2,
}  # fmt: skip
SMOOTHS = ("smoothquant", "awq", "awq_full")


@dataclass(frozen=True)
class Schedule:
    """What ModelOpt does to a model, or to each block of it.

    `algorithms`: one run of ModelOpt for each, in this order. `cache`: the algorithm that calibrates the KV cache, ""
    without one. `forwards`: the algorithms that run the data. `streams`: for each run of the data, which activations
    reach a layer. While statistics are collected no quantizer works, so runs share the activations of the unquantized
    model, 0, but where AWQ searches with the cache quantized, where Hessians are collected with cache and inputs
    quantized, and where weights are smoothed: after SmoothQuant and AWQ, and between the two parts of awq_full.
    """

    algorithms: tuple[str, ...] = ()
    cache: str = ""
    forwards: frozenset[str] = frozenset()
    streams: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many streams of activations the data have."""
        return max(self.streams, default=-1) + 1


def schedule_of(scheme: Scheme, formats: Collection[Format], cached: bool) -> Schedule:
    """Return the schedule of a scheme on a model whose sites have `formats`; `cached`: its KV cache is quantized.

    An algorithm treats every enabled quantizer alike, so each has a run of its own. "max" comes first, while the
    weights are still those of the model. The KV cache is calibrated with the only algorithm, as ModelOpt's presets do
    (AWQ searches with the cache quantized), and by "max" if there are several.
    """
    used = {calibrator(form) for form in formats}
    cache = (next(iter(used)) if len(used) == 1 else "max") if cached else ""
    algorithms = tuple(name for name in PASSES if name in used | {cache})
    forwards = {calibrator(form) for form in formats if is_calibrated(form)}
    if cached and is_measured(scheme.kv):
        forwards.add(cache)
    streams: list[int] = []
    stream, changed = 0, False
    inputs = {form.algorithm for form in formats if form.chosen and form.input}
    for name in (name for name in algorithms if name in forwards):
        stream += changed
        streams.append(stream)
        if PASSES[name] > 1:
            stream += cache == name or name in inputs
            streams.append(stream)
        if name == "awq_full":
            stream += 1
            streams.append(stream)
        changed = changed or name in SMOOTHS or name in inputs
    return Schedule(algorithms, cache, frozenset(forwards), tuple(streams))


@dataclass(frozen=True)
class Quantizers:
    """The quantizers that a scheme puts into a model, or into a part of it.

    `attention`: the modules whose cache is quantized, live -> checkpoint. `schedule`: that of the whole model.
    """

    scheme: Scheme
    bindings: Sequence[QuantizerBinding]
    attention: Mapping[str, str]
    schedule: Schedule

    def inside(self, holds: Callable[[str], bool]) -> Quantizers:
        """Those of a part of the model; `holds`: whether a live module lies in it."""
        bindings = [binding for binding in self.bindings if holds(binding.module)]
        attention = {live: ours for live, ours in self.attention.items() if holds(live)}
        return replace(self, bindings=bindings, attention=attention)


def method_of(algorithm: str, scheme: Scheme, widest: int = 0) -> dict[str, Any]:
    """Return ModelOpt's arguments of an algorithm. `widest`: the largest `in` of the matrices that it clips."""
    options = dict(scheme.options)
    # debug keeps the float32 scale of the weight (the buffer is rounded to the model's dtype), and the losses of clips
    awq = {name: options.get(name, value) for name, value in ALGORITHMS.get(algorithm, {}).items()} | {"debug": True}
    clipped = {**awq, "max_co_batch_size": rows_at_once(widest)}
    arguments: dict[str, dict[str, Any]] = {
        "smoothquant": {"alpha": options.get("alpha", 1.0)},
        "awq": {"method": "awq_lite", **awq},
        "awq_clip": clipped,
        "awq_full": clipped,
        "local_hessian": {"fp8_scale_sweep": True},
        "gptq": {"perc_damp": options.get("perc_damp", 0.01)},
    }
    return {"method": algorithm} | arguments.get(algorithm, {})
