"""Compare all tensors of a written model with its source.

Gates are two-sided (cosine and norm ratio) and the scheme's own. Only files are read, not the conversion's memory.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.dtypes import to_float32
from bridge.core.progress import BYTES, Progress, no_progress
from bridge.core.text import number
from bridge.planning.memory import stream_memory, working_set
from bridge.planning.plan import DEFAULT_FILE, Layout, Output, Plan, Step
from bridge.quant.calibration import Calibration
from bridge.quant.codec.arrays import cast
from bridge.quant.codec.decode import as_values
from bridge.quant.describe import format_name
from bridge.quant.schemes.grammar import Gate
from bridge.sources.source import Source, lazy
from bridge.streaming.rows import Rows, in_threads
from bridge.streaming.run import Budget
from bridge.streaming.written import OutputReader
from bridge.verification.compare import compare_step, equal_bytes
from bridge.verification.counts import Counts, groups_of, is_finite
from bridge.verification.expected import Expected, ExpectedScales
from bridge.verification.outputs import cosine_and_ratio, failure, finite_or, relative_l2
from bridge.verification.parity import Parity, TensorParity


def tensor_parity(
    plan: Plan,
    source: Source,
    gates: Mapping[str, Gate],
    directory: Path,
    progress: Progress = no_progress,
    *,
    calibration: Calibration | None = None,
    memory: int | None = None,
) -> Parity:
    """Compare every tensor in the files of `directory` with its source.

    There is a row for every quantized weight and for every other difference: unquantized tensors must be equal, scales
    those of the calibration or of the quantized source.

    Args:
        gates: module -> the gate of its weight.
        calibration: the one kept with the output; without it, `not_run` lists what was not compared.
        memory: bytes that running steps may use together; None takes the plan's.
    """
    scales, counts = ExpectedScales(plan, source, calibration), Counts()
    check = _Check(plan, source, gates, OutputReader(plan, directory), scales, counts)
    budget = Budget(max(stream_memory(plan, None) if memory is None else memory, 1))
    total, done, lock = sum(step.nbytes for step in plan.steps), [0], threading.Lock()

    def one(step: Step, buffers: Buffers) -> list[TensorParity]:
        with budget.taken(working_set(step, plan.sources)):
            rows = check.step(step, buffers)
        with lock:
            done[0] += step.nbytes
            progress(done[0], total, BYTES[1])
        return rows

    rows = tuple(row for of_step in in_threads(one, plan.steps, source, directory) for row in of_step)
    return Parity(rows, not_run=check.not_compared(), counts=counts.counts(len(plan.outputs)), scales=counts.scales())


@dataclass(frozen=True)
class _Check:
    """Compares the outputs of one step at a time."""

    plan: Plan
    source: Source
    gates: Mapping[str, Gate]
    output: OutputReader
    scales: ExpectedScales
    counts: Counts

    def step(self, step: Step, buffers: Buffers) -> list[TensorParity]:
        rows: list[TensorParity | None] = []
        match step.layout:
            case Layout.ROWS | Layout.WHOLE | Layout.EXPERTS:
                rows += [] if self.scales.hidden(step) else [self._quantized(step, buffers)]
            case Layout.PLAIN:
                folded = step.folded or step.feeds_as_writer
                return [row for row in (self._folded(step) if folded else self._plain(step, buffers)) if row]
            case Layout.SCALES:
                pass
        expected = self.scales.expected(step)
        for output in step.outputs:
            if output.part in expected:
                values = as_values(self.output.read(output), output.spec.dtype)
                self.counts.constant(output, values)
                rows.append(_differing(output, expected[output.part], values))
        for group, output in groups_of(step):
            self.counts.member(group, self.output.read(output).tobytes())
        return [row for row in rows if row]

    def not_compared(self) -> tuple[str, ...]:
        """Scales that neither a calibration nor a quantized source determines, in one sentence."""
        unknown = Counter(part for step in self.plan.steps for part in self.scales.unknown(step))
        if not unknown:
            return ()
        parts = ", ".join(f"{count} {part}" for part, count in sorted(unknown.items()))
        return (f"no calibration beside the output to compare with: {parts}",)

    def _plain(self, step: Step, buffers: Buffers) -> list[TensorParity]:
        """Empty if the tensor has exactly the bits of the plan."""
        output, rows, finite = step.outputs[0], Rows(step, self.source, buffers), True
        for first, parts in rows.pieces():
            written = self.output.rows(output, first, parts[-1].stop, rows.rows, buffers)
            at = 0
            for part in parts:
                bits = part.bits
                if step.shift:  # the same sum, rounded once
                    bits = to_float32(bits, rows.spec.dtype) + np.float32(step.shift)
                bits = cast(bits, "float32" if step.shift else rows.spec.dtype, output.spec.dtype)
                stored = written[at : at + bits.nbytes]
                finite = finite and is_finite(stored.view(bits.dtype), output.spec.dtype)
                if not equal_bytes(np.ascontiguousarray(bits), stored):
                    self.counts.plain(finite, equal=False)
                    return [_broken(output, "unquantized", "its bits are not the source's")]
                at += bits.nbytes
        self.counts.plain(finite, equal=True)
        return []

    def _folded(self, step: Step) -> list[TensorParity | None]:
        """A norm, or a tensor that another matrix reads, that a pre-scale was multiplied into."""
        output, dtype = step.outputs[0], self.plan.sources[step.source].dtype
        values = to_float32(self.output.read(output), output.spec.dtype)
        expected = self.scales.folded(step, to_float32(lazy(self.source, step.source).read(), dtype))
        if expected is None:
            finite = bool(np.isfinite(values).all())
            return [] if finite else [_broken(output, "folded", "it is not finite")]
        self.counts.constant(output, values)
        return [_differing(output, expected, values.reshape(-1))]

    def _quantized(self, step: Step, buffers: Buffers) -> TensorParity:
        assert step.site and step.format
        sums = compare_step(step, self.source, self.output, self.scales, buffers)
        self.counts.coded(step, sums)
        gate = self.gates[step.site.module]
        why = failure(gate, sums.cosine, sums.norm_ratio)
        if not sums.source:  # an all-zero weight has no direction; it must be written as zeros
            why = "the source is all zeros, and the written weight is not" if sums.decoded else ""
        if sums.not_nearest:
            wrong = "that calibration did not choose" if step.format.compensated else "not rounded to nearest"
            why = why or f"{number(sums.not_nearest, 'code')} of {sums.codes:,} {wrong}"
        if sums.not_repeated:
            again = f"of {sums.codes:,} differ from those searched again with the calibration's importance"
            why = why or f"{number(sums.not_repeated, 'code')} {again}"
        return TensorParity(
            _name(next(o for o in step.outputs if o.part == "weight")),
            format_name(step.format),
            finite_or(sums.cosine),
            finite_or(sums.norm_ratio),
            finite_or(min(max(sums.sqnr, -999.0), 999.0), -999.0),
            finite_or(sums.worst, 999.0),
            not why,
            why,
            gate.cosine,
        )


def _differing(output: Output, expected: Expected, values: np.ndarray) -> TensorParity | None:
    """A failed row if written values are not the expected ones."""
    if expected.agrees(values):
        return None
    cosine, ratio = cosine_and_ratio(values, expected.values)
    error = relative_l2(values.reshape(expected.values.shape), expected.values)
    sqnr = min(-20 * math.log10(error), 999.0) if error > 0 and math.isfinite(error) else -999.0
    why = f"{output.part} is not the expected value"
    worst = finite_or(error, 999.0)
    return TensorParity(_name(output), output.part, finite_or(cosine), finite_or(ratio), sqnr, worst, False, why)


def _broken(output: Output, kind: str, why: str) -> TensorParity:
    """A failed row of a tensor that has nothing to measure."""
    return TensorParity(_name(output), kind, 0.0, 0.0, 0.0, 0.0, False, why)


def _name(output: Output) -> str:
    return output.spec.name if output.file == DEFAULT_FILE else f"{output.file}: {output.spec.name}"
