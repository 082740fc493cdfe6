"""Thread-safe counters for the verification summary.

Only integers are added and bytes compared, so the result does not depend on the order in which steps end.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np

from bridge.core.dtypes import FLOATS
from bridge.core.text import pattern
from bridge.core.values import EITHER
from bridge.planning.plan import Output, Step
from bridge.quant.codec.arrays import Array, amax_of
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.verification.parity import Count, ScaleRange
from bridge.verification.scale_range import ScaleStats
from bridge.verification.weight_error import ErrorSums

COMPARED = "written tensors compared with their source"
FINITE = "compared tensors without NaN or infinity"
NEAREST = "codes rounded to nearest in the weight's dtype"
CHOSEN = "codes that are those that calibration chose"
REPEATED = "codes searched again with their importance, the same"
USABLE, SIGNED = "scales finite and above zero", "scales of either sign, finite and not zero"
EQUAL = "unquantized tensors identical to the source"
SHARED = "groups that share a scale, equal in the files"
ORDER = (COMPARED, FINITE, NEAREST, CHOSEN, REPEATED, USABLE, SIGNED, EQUAL, SHARED)
MADE_OF_WEIGHTS = ("weight", "scale", "scale_2", "bias")


class Counts:
    """How many checks passed, and how many were made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed, self._checked = Counter[str](), Counter[str]()
        self._scales: dict[str, ScaleStats] = {}
        self._groups: dict[tuple[object, ...], list[bytes]] = {}

    def coded(self, step: Step, sums: ErrorSums) -> None:
        outputs = [output for output in step.outputs if output.part in MADE_OF_WEIGHTS]
        weight = next(output.spec for output in outputs if output.part == "weight")
        kind, codes = pattern(weight.name), sums.codes
        finite = bool(np.isfinite(sums.decoded)) * len(outputs)
        with self._lock:
            self._add(COMPARED, len(outputs), len(outputs))
            self._add(FINITE, finite, len(outputs))
            compensated = step.format is not None and step.format.compensated
            self._add(CHOSEN if compensated else NEAREST, codes - sums.not_nearest, codes)
            self._add(REPEATED, sums.repeated - sums.not_repeated, sums.repeated)
            signed = step.format is not None and step.format.weight[0].search == EITHER
            self._add(SIGNED if signed else USABLE, sums.scales.count - sums.scales.unusable, sums.scales.count)
            self._scales[kind] = self._scales.get(kind, ScaleStats()) + sums.scales

    def plain(self, finite: bool, equal: bool) -> None:
        with self._lock:
            self._add(COMPARED, 1, 1)
            self._add(FINITE, finite, 1)
            self._add(EQUAL, equal, 1)

    def constant(self, output: Output, values: Array) -> None:
        """Count one tensor that calibration or a quantized source decides: a scale, a shape, a folded norm."""
        finite, scale = bool(np.isfinite(values).all()), output.part not in ("weight", "shape", "zeros", "order")
        with self._lock:
            self._add(COMPARED, 1, 1)
            self._add(FINITE, finite, 1)
            if scale:
                self._add(USABLE, int(((values > 0) & np.isfinite(values)).sum()), values.size)

    def member(self, key: tuple[object, ...], stored: bytes) -> None:
        """Record the bytes of a scale that all members of a group must have."""
        with self._lock:
            self._groups.setdefault(key, []).append(stored)

    def counts(self, outputs: int) -> tuple[Count, ...]:
        """All counts; `outputs`: how many tensors the plan writes."""
        groups = [members for members in self._groups.values() if len(members) > 1]
        passed = Counter({**self._passed, SHARED: sum(len(set(members)) == 1 for members in groups)})
        checked = Counter({**self._checked, COMPARED: outputs, SHARED: len(groups)})
        return tuple(Count(what, passed[what], checked[what]) for what in ORDER if checked[what])

    def scales(self) -> tuple[ScaleRange, ...]:
        """Histograms of weight scales by kind of tensor."""
        ranges = []
        for kind, stats in sorted(self._scales.items()):
            if stats.powers:
                low, high = min(stats.powers), max(stats.powers)
                counts = tuple(stats.powers.get(power, 0) for power in range(low, high + 1))
                ranges.append(ScaleRange(kind, stats.count, low, counts))
        return tuple(ranges)

    def _add(self, what: str, passed: int, checked: int) -> None:
        self._passed[what] += passed
        self._checked[what] += checked


def groups_of(step: Step) -> Iterator[tuple[tuple[object, ...], Output]]:
    """The scales that a step shares with other steps: group, output."""
    outputs = {output.part: output for output in step.outputs}
    if step.shares and step.format and has_tensor_scale(step.format):
        part = "scale_2" if "scale_2" in outputs else "scale"
        yield (step.shares, part), outputs[part]
    for part in ("input_scale", "pre_quant_scale"):
        if len(step.unified) > 1 and part in outputs:
            yield (step.unified, part, step.inputs[0].inner), outputs[part]


def is_finite(bits: Array, dtype: str) -> bool:
    """Whether a storage array of a compute dtype holds no NaN and no infinity; True for every other dtype."""
    return dtype not in FLOATS or bool(np.isfinite(amax_of(bits, dtype)))
