"""What the proof counts while it compares, from all threads; must never read a weight itself.

Only integers are added up and bytes compared, so the order in which steps end does not show.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np

from bridge.dtypes import FLOATS
from bridge.planning import Output, Step
from bridge.quant.bits import Array, amax, matrix
from bridge.quant.compare import Parity
from bridge.quant.scheme import has_tensor_scale
from bridge.quant.spread import Spread
from bridge.report import Count, ScaleRange
from bridge.show import pattern

COMPARED = "written tensors compared with what they were made from"
FINITE = "compared tensors without NaN or infinity"
NEAREST = "codes that are the nearest to their weight"
USABLE = "scales finite and above zero"
EQUAL = "tensors carried unquantized, equal to the bit"
SHARED = "groups that share a scale, equal in the files"
ORDER = (COMPARED, FINITE, NEAREST, USABLE, EQUAL, SHARED)
MADE_OF_WEIGHTS = ("weight", "scale", "scale_2")


class Tally:
    """Counts of what held, and of what was asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held, self._asked = Counter[str](), Counter[str]()
        self._scales: dict[str, Spread] = {}
        self._groups: dict[tuple[object, ...], list[bytes]] = {}

    def coded(self, step: Step, parity: Parity) -> None:
        """Count one quantized weight: its codes and scales."""
        outputs = [output for output in step.outputs if output.part in MADE_OF_WEIGHTS]
        weight = next(output.spec for output in outputs if output.part == "weight")
        kind, codes = pattern(weight.name), parity.codes
        finite = bool(np.isfinite(parity.decoded)) * len(outputs)
        with self._lock:
            self._add(COMPARED, len(outputs), len(outputs))
            self._add(FINITE, finite, len(outputs))
            self._add(NEAREST, codes - parity.beyond, codes)
            self._add(USABLE, parity.scales.count - parity.scales.unusable, parity.scales.count)
            self._scales[kind] = self._scales.get(kind, Spread()) + parity.scales

    def carried(self, finite: bool, equal: bool) -> None:
        """Count one tensor that is not quantized."""
        with self._lock:
            self._add(COMPARED, 1, 1)
            self._add(FINITE, finite, 1)
            self._add(EQUAL, equal, 1)

    def constant(self, output: Output, values: Array) -> None:
        """Count one tensor that calibration or a quantized source decides: scales, shapes, folded norms."""
        finite, scale = bool(np.isfinite(values).all()), output.part not in ("weight", "shape")
        with self._lock:
            self._add(COMPARED, 1, 1)
            self._add(FINITE, finite, 1)
            if scale:
                self._add(USABLE, int(((values > 0) & np.isfinite(values)).sum()), values.size)

    def member(self, key: tuple[object, ...], stored: bytes) -> None:
        """Note the bytes of a scale that all members of a group must have."""
        with self._lock:
            self._groups.setdefault(key, []).append(stored)

    def counts(self, outputs: int) -> tuple[Count, ...]:
        """Everything that was counted; `outputs`: how many tensors the plan writes."""
        groups = [members for members in self._groups.values() if len(members) > 1]
        held = Counter({**self._held, SHARED: sum(len(set(members)) == 1 for members in groups)})
        asked = Counter({**self._asked, COMPARED: outputs, SHARED: len(groups)})
        return tuple(Count(what, held[what], asked[what]) for what in ORDER if asked[what])

    def scales(self) -> tuple[ScaleRange, ...]:
        """Histograms of weight scales by kind of tensor."""
        found = []
        for kind, spread in sorted(self._scales.items()):
            if spread.powers:
                low, high = min(spread.powers), max(spread.powers)
                counts = tuple(spread.powers.get(power, 0) for power in range(low, high + 1))
                found.append(ScaleRange(kind, spread.count, low, counts))
        return tuple(found)

    def _add(self, what: str, held: int, asked: int) -> None:
        self._held[what] += held
        self._asked[what] += asked


def groups_of(step: Step) -> Iterator[tuple[tuple[object, ...], Output]]:
    """The scales of a step that others must have, too: group, output."""
    outputs = {output.part: output for output in step.outputs}
    if step.shares and step.format and has_tensor_scale(step.format):
        part = "scale_2" if "scale_2" in outputs else "scale"
        yield (step.shares, part), outputs[part]
    for part in ("input_scale", "pre_quant_scale"):
        if len(step.unified) > 1 and part in outputs:
            yield (step.unified, part, step.inputs[0].inner), outputs[part]


def is_finite(bits: Array, dtype: str) -> bool:
    """Whether a storage array of what models compute in holds no NaN and no infinity; True for every other dtype."""
    if dtype not in FLOATS or not bits.size:
        return True
    flat = matrix(bits)
    return bool(np.isfinite(amax(flat, dtype, *flat.shape)[0, 0]))
