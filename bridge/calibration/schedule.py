"""The runs of the data that ModelOpt's algorithms ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge.calibration.quantizers import QuantizerBinding, calibrator
from bridge.quant.schemes.scheme import Scheme, is_calibrated, is_measured

PASSES = {"max": 1, "mse": 1, "smoothquant": 1, "awq": 2}  # runs of the whole data, in the order of the algorithms


@dataclass(frozen=True)
class Schedule:
    """What ModelOpt does to a model, or to each block of it.

    `algorithms`: one run of ModelOpt for each, in this order. `cache`: the algorithm that calibrates the KV cache, ""
    without one. `forwards`: the algorithms that run the data. `streams`: for each run of the data, which activations
    reach a layer. While statistics are collected no quantizer works, so runs share the activations of the unquantized
    model, 0, but for two: AWQ searches with the cache quantized, and after SmoothQuant weights are smoothed.
    """

    algorithms: tuple[str, ...] = ()
    cache: str = ""
    forwards: frozenset[str] = frozenset()
    streams: tuple[int, ...] = ()


def schedule_of(scheme: Scheme, bindings: Sequence[QuantizerBinding], cached: bool) -> Schedule:
    """Return the schedule of a scheme on a model; `cached`: it quantizes the KV cache of attention modules.

    An algorithm treats every enabled quantizer alike, so each has a run of its own. "max" comes first, while the
    weights are still those of the model. The KV cache is calibrated with the only algorithm, as ModelOpt's presets do
    (AWQ searches with the cache quantized), and by "max" if there are several.
    """
    used = {calibrator(binding.format) for binding in bindings}
    cache = (next(iter(used)) if len(used) == 1 else "max") if cached else ""
    algorithms = tuple(name for name in PASSES if name in used | {cache})
    forwards = {calibrator(binding.format) for binding in bindings if is_calibrated(binding.format)}
    if cached and scheme.kv and is_measured(scheme.kv):
        forwards.add(cache)
    streams: list[int] = []
    stream = 0
    for name in (name for name in algorithms if name in forwards):
        if name == "awq" and "smoothquant" in forwards:
            stream += 1
        streams.append(stream)
        if name == "awq":
            stream += cache == "awq"
            streams.append(stream)
    return Schedule(algorithms, cache, frozenset(forwards), tuple(streams))
