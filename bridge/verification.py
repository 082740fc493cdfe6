"""The proof: re-reads what was written, dequantizes it, compares it with the source, runs it.

Gates are two-sided (cosine and norm ratio) and the scheme's own. Nothing here reads what the conversion held in memory.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bridge.budget import coded_whole, cores, stream_memory, working_set
from bridge.calibrated import Expected, Statistics, as_values
from bridge.dtypes import to_float32
from bridge.errors import CannotRun
from bridge.planning import DEFAULT_FILE, Output, Plan, Step
from bridge.progress import BYTES, Progress, quiet
from bridge.quant.answers import mean_perplexity, next_token_loss
from bridge.quant.bits import cast
from bridge.quant.compare import UNIT
from bridge.quant.grammar import Gate
from bridge.reading import Buffers, Rows
from bridge.remote.threads import readers
from bridge.report import OutputParity, Parity, TensorParity
from bridge.sources import lazy
from bridge.stacks import compare_stack, in_blocks
from bridge.stream import Budget
from bridge.tally import Tally, groups_of, is_finite
from bridge.values import Format, Numeric
from bridge.written import WrittenTensors, compare_rows, compare_whole, equal_bytes

if TYPE_CHECKING:
    from bridge.quant.calibration import Calibration, HeldOut
    from bridge.sources import Source


class Runnable(Protocol):
    """A written model, loaded: `run` returns outputs by name, `twin` says why it is not the file itself that runs."""

    outputs: list[str]
    twin: str

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...


# float32 sums of a few thousand products in another order: an unquantized graph must be this near, relative L2.
FLOAT_ERROR = 1e-3
# A position agrees if it is within 1e-4: flips cost 1e-2, float32 rounding 1e-6.
EXACT = 1e-4


def tensor_parity(
    plan: Plan,
    source: Source,
    gates: Mapping[str, Gate],
    directory: Path,
    progress: Progress = quiet,
    *,
    calibration: Calibration | None = None,
    memory: int | None = None,
) -> Parity:
    """Compare every tensor in the files of `directory` with what it was made from.

    There is a row for every quantized weight, and for what else differs: carried tensors must be equal, scales those
    of the calibration or of the quantized source.

    Args:
        gates: module -> the gate of its weight.
        calibration: what lies beside the output; without it `not_run` says what was not compared.
        memory: bytes that running steps may use together; None takes what the plan says.
    """
    statistics, tally = Statistics(plan, source, calibration), Tally()
    check = _Check(plan, source, gates, WrittenTensors(plan, directory), statistics, tally)
    budget = Budget(max(stream_memory(plan, None) if memory is None else memory, 1))
    total, done, lock, idle = sum(step.nbytes for step in plan.steps), [0], threading.Lock(), SimpleQueue[Buffers]()
    workers = cores()
    for _ in range(workers):
        idle.put(Buffers())

    def one(step: Step) -> list[TensorParity]:
        buffers = idle.get()
        try:
            with budget.taken(working_set(step, plan.sources)):
                found = check.step(step, buffers)
        finally:
            idle.put(buffers)
        with lock:
            done[0] += step.nbytes
            progress(done[0], total, BYTES[1])
        return found

    with readers(workers, source, directory) as pool:
        rows = tuple(row for found in pool.map(one, plan.steps) for row in found)
    return Parity(rows, not_run=check.not_compared(), counts=tally.counts(len(plan.outputs)), scales=tally.scales())


@dataclass(frozen=True)
class _Check:
    """Compares the outputs of one step at a time."""

    plan: Plan
    source: Source
    gates: Mapping[str, Gate]
    written: WrittenTensors
    statistics: Statistics
    tally: Tally

    def step(self, step: Step, buffers: Buffers) -> list[TensorParity]:
        rows: list[TensorParity | None] = [self._quantized(step, buffers)] if step.format else []
        expected = self.statistics.expected(step)
        for output in step.outputs:
            if output.part in expected:
                found = as_values(self.written.read(output), output.spec.dtype)
                self.tally.constant(output, found)
                rows.append(_differing(output, expected[output.part], found))
        for group, output in groups_of(step):
            self.tally.member(group, self.written.read(output).tobytes())
        if step.inputs and not step.format:
            rows += self._folded(step) if step.folded else self._carried(step, buffers)
        return [row for row in rows if row]

    def not_compared(self) -> tuple[str, ...]:
        """Constants that neither a calibration nor a quantized source tells, in one sentence."""
        counts = Counter(part for step in self.plan.steps for part in self.statistics.unknown(step))
        if not counts:
            return ()
        said = ", ".join(f"{count} {part}" for part, count in sorted(counts.items()))
        return (f"no calibration lies beside the output to compare with: {said}",)

    def _carried(self, step: Step, buffers: Buffers) -> list[TensorParity]:
        """Empty where the tensor is what the plan says, to the bit."""
        output, rows, finite = step.outputs[0], Rows(step, self.source, buffers), True
        for first, parts in rows.pieces():
            found = self.written.rows(output, first, parts[-1].stop, rows.rows, buffers)
            at = 0
            for part in parts:
                bits = part.bits
                if step.shift:  # the same sum, rounded once
                    bits = to_float32(bits, rows.spec.dtype) + np.float32(step.shift)
                bits = cast(bits, "float32" if step.shift else rows.spec.dtype, output.spec.dtype)
                stored = found[at : at + bits.nbytes]
                finite = finite and is_finite(stored.view(bits.dtype), output.spec.dtype)
                if not equal_bytes(np.ascontiguousarray(bits), stored):
                    self.tally.carried(finite, equal=False)
                    return [TensorParity(_name(output), "carried", 0.0, 0.0, 0.0, 0.0, False)]
                at += bits.nbytes
        self.tally.carried(finite, equal=True)
        return []

    def _folded(self, step: Step) -> list[TensorParity | None]:
        """A norm that a pre-scale was multiplied into."""
        output, dtype = step.outputs[0], self.plan.sources[step.source].dtype
        found = to_float32(self.written.read(output), output.spec.dtype)
        expected = self.statistics.folded(step, to_float32(lazy(self.source, step.source).read(), dtype))
        if expected is None:
            finite = bool(np.isfinite(found).all())
            return [] if finite else [TensorParity(_name(output), "folded", 0.0, 0.0, 0.0, 0.0, False)]
        self.tally.constant(output, found)
        return [_differing(output, expected, found.reshape(-1))]

    def _quantized(self, step: Step, buffers: Buffers) -> TensorParity:
        assert step.site and step.format
        if in_blocks(step):
            parity = compare_stack(step, self.source, self.written, buffers)
        else:
            compared = compare_whole if coded_whole(step) else compare_rows
            parity = compared(step, self.source, self.written, self.statistics, buffers)
        self.tally.coded(step, parity)
        gate = self.gates[step.site.module]
        passed = _passes(gate, parity.cosine, parity.norm_ratio)
        if not parity.source:  # an all-zero weight has no direction; it must be written as zeros
            passed = not parity.decoded
        beyond = f": {parity.beyond} codes are not the nearest" if parity.beyond else ""
        return TensorParity(
            _name(next(o for o in step.outputs if o.part == "weight")),
            format_name(step.format) + beyond,
            _finite(parity.cosine),
            _finite(parity.norm_ratio),
            _finite(min(max(parity.sqnr, -999.0), 999.0), -999.0),
            _finite(parity.worst, 999.0),
            passed and not parity.beyond,
        )


def _differing(output: Output, expected: Expected, found: np.ndarray) -> TensorParity | None:
    """A row that failed where a constant is not what it should be."""
    if expected.agrees(found):
        return None
    cosine, ratio = cosine_and_ratio(found, expected.values)
    error = relative_l2(found.reshape(expected.values.shape), expected.values)
    sqnr = min(-20 * math.log10(error), 999.0) if error > 0 and math.isfinite(error) else -999.0
    return TensorParity(
        _name(output), output.part, _finite(cosine), _finite(ratio), sqnr, _finite(error, 999.0), passed=False
    )


def _name(output: Output) -> str:
    return output.spec.name if output.file == DEFAULT_FILE else f"{output.file}: {output.spec.name}"


def format_name(format_: Format) -> str:
    """Short name of a format for tables: `w int4/128 a fp8`."""
    text = "w " + "+".join(_numeric_name(n) for n in format_.weight)
    return f"{text} a {_numeric_name(format_.input)}" if format_.input else text


def _numeric_name(numeric: Numeric) -> str:
    short = {"float8_e4m3fn": "fp8", "float4_e2m1fn": "fp4"}.get(numeric.dtype, numeric.dtype)
    return f"{short}/{'x'.join(map(str, numeric.block))}" if numeric.block else short


def float_error(plan: Plan) -> float:
    """How far an unquantized model may lie from its source: more where it was rounded to another dtype.

    Weights of small GPT-2s and Llamas rounded to float16 move the logits by 0.2e-3 to 1.2e-3, up to 2.5 roundings.
    """
    rounded = [
        UNIT[output.spec.dtype]
        for step in plan.steps
        for output in step.outputs
        if output.spec.dtype in UNIT and step.source and output.spec.dtype != plan.sources[step.source].dtype
    ]
    return FLOAT_ERROR + 4 * max(rounded, default=0.0)


def output_parity(
    runtime: Runnable,
    held: HeldOut,
    gate: Gate,
    quantized: bool,
    progress: Progress = quiet,
    within: float = FLOAT_ERROR,
) -> tuple[OutputParity, ...]:
    """Run the written model on held-out inputs and compare with what the references answered.

    Against "source" the scheme's gate decides; an unquantized model must lie `within`. Against "modelopt"
    the difference must also stay below the scheme's own error: one code that flips at a tie (6 of 98,304 in the first
    layer of a BERT in fp8) is felt by every later layer and token, so equality can only be asked node by node.
    """
    answers: list[np.ndarray] = []
    losses: list[tuple[float, int]] = []
    for at, batch in enumerate(held.inputs):
        out = runtime.run(batch)
        first = out[runtime.outputs[0]]
        if at == 0 and first.shape[-1] <= held.columns.max(initial=0):
            raise CannotRun("the graph's task has another output than the model that gave the answers to compare with")
        if at == 0:
            answers.append(first.reshape(-1, first.shape[-1])[held.rows][:, held.columns])
        if held.source_perplexity is not None:
            losses.append(next_token_loss(first, batch))
        progress(at + 1, len(held.inputs), "run in ONNX Runtime")
    perplexity = mean_perplexity(losses)
    ours = _outputs("source", answers[0], held.source, gate, perplexity, held.source_perplexity)
    if not quantized:
        return (replace(ours, passed=ours.relative_l2 <= within),)
    if held.quantized.size == 0:
        return (ours,)
    theirs = _outputs("modelopt", answers[0], held.quantized, gate, perplexity, held.quantized_perplexity)
    own_error = relative_l2(held.quantized, held.source)
    near = theirs.relative_l2 <= max(own_error, FLOAT_ERROR)
    return ours, replace(theirs, passed=theirs.passed and near)


def _outputs(
    reference: str, ours: np.ndarray, theirs: np.ndarray, gate: Gate, perplexity: float | None, other: float | None
) -> OutputParity:
    cosine, ratio = cosine_and_ratio(ours, theirs)
    passed = _passes(gate, cosine, ratio)
    norms = np.linalg.norm(theirs.astype(np.float64), axis=1)
    exact = np.linalg.norm(ours.astype(np.float64) - theirs, axis=1) <= EXACT * norms
    return OutputParity(
        reference,
        len(ours),
        _finite(cosine),
        _finite(ratio),
        _finite(relative_l2(ours, theirs), 999.0),
        float(exact.mean()),
        perplexity,
        other,
        bool(passed),
    )


def _passes(gate: Gate, cosine: float, ratio: float) -> bool:
    return bool(cosine >= gate.cosine and gate.norm[0] <= ratio <= gate.norm[1])  # False for NaN


def _finite(value: float, instead: float = 0.0) -> float:
    """A report holds no NaN and no infinity: what is not finite fails its gate and is told as the worst value."""
    return value if math.isfinite(value) else instead


def cosine_and_ratio(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Cosine of all values taken as one vector, and |ours| / |theirs|, in float64."""
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if not norm_a or not norm_b:
        return float(norm_a == norm_b), float(norm_a == norm_b)
    return float(a @ b) / (norm_a * norm_b), norm_a / norm_b


def relative_l2(ours: np.ndarray, theirs: np.ndarray) -> float:
    """|ours - theirs| / |theirs| in float64."""
    norm = float(np.linalg.norm(theirs.astype(np.float64)))
    return float(np.linalg.norm(ours.astype(np.float64) - theirs)) / norm if norm else 0.0
