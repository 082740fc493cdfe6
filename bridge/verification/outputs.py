"""Compare the outputs of two models: cosine and norm ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bridge.calibration.reference_outputs import mean_perplexity, next_token_loss
from bridge.core.dtypes import UNIT
from bridge.core.errors import CannotRun
from bridge.core.machine import returning_pages
from bridge.core.progress import Progress, no_progress
from bridge.planning.plan import Plan, Step
from bridge.quant.calibration import HeldOut
from bridge.quant.schemes.grammar import Gate
from bridge.targets.target import LOG_PROBABILITIES, Runnable
from bridge.verification.parity import Evaluation, OutputParity

# float32 sums of a few thousand products in another order: the largest relative L2 error of an unquantized graph.
FLOAT_ERROR = 1e-3
# A position agrees if it is within 1e-4: flips cost 1e-2, float32 rounding 1e-6.
EXACT = 1e-4
POSITIONS = 64  # that are compared of a graph that gives one a run
Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


def float_error(plan: Plan) -> float:
    """The largest error of an unquantized model against its source: more if either of them rounds to 16 bits.

    Weights of small GPT-2s and Llamas rounded to float16 move the logits by 0.2e-3 to 1.2e-3, up to 2.5 roundings. A
    source in 16 bits runs in them, and rounds after each operation, where another runtime does not.
    """
    rounded = [
        UNIT[dtype]
        for step in plan.steps
        for output in step.outputs
        if step.source
        for dtype in (output.spec.dtype, plan.sources[step.source].dtype)
        if dtype in UNIT
    ]
    return FLOAT_ERROR + 4 * max(rounded, default=0.0)


def error_factor(plan: Plan) -> float:
    """How far a written model may lie from ModelOpt's fake-quantized one, as a multiple of the latter's own error.

    Once; or, if codes are rounded under other scales than ModelOpt's, the length of two independent errors of its size.
    """
    return math.sqrt(2) if any(map(_other_scales, plan.quantized)) else 1.0


def _other_scales(step: Step) -> bool:
    """Whether a weight has other scales than ModelOpt gives it.

    It takes the pre-scale of a matrix that reads it, has another bound, shares the FP8 scale of a fused matrix, or has
    the mean of the pre-scales of all that read its input, which ModelOpt's own export has and its model does not.
    """
    assert step.site and step.format
    fused = step.shares and step.shares != step.site.shares and not step.unified
    averaged = len(step.unified) > 1 and step.format.prescales
    return bool(step.feeds or step.coding.bound or averaged or (fused and step.format.weight[0].per == "tensor"))


@dataclass(frozen=True)
class Limits:
    """How far outputs may lie from others: `within` of the source, without a scheme; `errors`: see `error_factor`.

    `centred`: quantized logits of next tokens are compared less their mean, which softmax does not see.
    """

    within: float = FLOAT_ERROR
    errors: float = 1.0
    centred: bool = True


@returning_pages()
def output_parity(
    runtime: Runnable,
    references: HeldOut,
    gate: Gate,
    quantized: bool,
    progress: Progress = no_progress,
    limits: Limits = Limits(),
    run_last: Run | None = None,
) -> tuple[OutputParity, ...]:
    """Run the written model on held-out inputs and compare its outputs with those of the references.

    Against "source" the scheme's gate decides; an unquantized model must lie within a limit. Against "modelopt"
    the difference must also stay below the scheme's own error, times a factor: one code that flips at a tie (6
    of 98,304 in the first layer of a BERT in fp8) changes every later layer and token, so only single nodes can be
    compared for equality. `run_last`: it gives outputs of the last token alone, and reads a prefix for each position.
    """
    predicts = quantized and references.source_perplexity is not None
    centred = runtime.outputs[0] == LOG_PROBABILITIES or (limits.centred and predicts)
    answers: list[np.ndarray] = []
    losses: list[tuple[float, int]] = []
    stage = f"run in {getattr(runtime, 'program', 'torch' if hasattr(runtime, 'model') else 'ONNX Runtime')}"
    if run_last:
        first, references = _of_prefixes(
            run_last, runtime.outputs[0], references, lambda done, of: progress(done, of, stage)
        )
        answers.append(first)
    for at, batch in enumerate([] if run_last else references.inputs):
        out = runtime.run(batch)
        first = out[runtime.outputs[0]]
        if at == 0 and first.shape[-1] <= references.columns.max(initial=0):
            raise CannotRun("the graph has another output than its source: their tasks differ")
        if at == 0:
            answers.append(first.reshape(-1, first.shape[-1])[references.rows][:, references.columns])
        if references.source_perplexity is not None:
            losses.append(next_token_loss(first, batch))
        del out, first  # before the next ones are made
        progress(at + 1, len(references.inputs), stage)
    if centred:
        answers = [_centered(answers[0])]
        references = replace(references, source=_centered(references.source), quantized=_centered(references.quantized))
    perplexity = mean_perplexity(losses)
    ours = _outputs("source", answers[0], references.source, gate, perplexity, references.source_perplexity)
    if not quantized:
        return (_judged(ours, _above(ours.relative_l2, limits.within)),)
    if references.quantized.size == 0:
        return (ours,)
    theirs = _outputs("modelopt", answers[0], references.quantized, gate, perplexity, references.quantized_perplexity)
    own_error = relative_l2(references.quantized, references.source)
    most = max(own_error * limits.errors, FLOAT_ERROR)
    return ours, _judged(theirs, theirs.why or _above(theirs.relative_l2, most))


def first_tokens(batch: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """A batch with each of its texts cut after so many tokens; a decoder's outputs at these stay what they are."""
    width = batch["input_ids"].shape[1]
    along = (name for name, array in batch.items() if array.ndim == 2 and array.shape[1] == width)
    return {**batch, **{name: batch[name][:, :tokens] for name in along}}


def of_first_tokens(references: HeldOut, tokens: int) -> HeldOut:
    """The references at the first tokens of each text alone, without perplexities if that leaves some out."""
    width = references.inputs[0]["input_ids"].shape[1]
    if width <= tokens:
        return references
    lines, places = np.divmod(references.rows, width)
    kept = places < tokens
    if not kept.any():
        raise CannotRun(f"all positions to compare lie after the first {tokens} tokens of their text")
    return replace(
        references, inputs=tuple(first_tokens(batch, tokens) for batch in references.inputs),
        rows=(lines * tokens + places)[kept], source=references.source[kept],
        quantized=references.quantized[kept] if references.quantized.size else references.quantized,
        source_perplexity=None, quantized_perplexity=None,
    )  # fmt: skip


def with_evaluation(
    outputs: tuple[OutputParity, ...], evaluation: Evaluation | None, judges: bool
) -> tuple[OutputParity, ...]:
    """The same with the perplexities of an evaluation, which rests on more tokens. `judges`: in place of the gate."""
    if evaluation is None:
        return outputs
    rows = []
    for row in outputs:
        if row.reference == "source":
            row = replace(row, perplexity=evaluation.perplexity, reference_perplexity=evaluation.source_perplexity)
            row = replace(row, passed=True, why="") if judges and evaluation.bound else row
        else:
            row = replace(row, perplexity=None, reference_perplexity=None)
        rows.append(row)
    return tuple(rows)


def _of_prefixes(
    run: Run, output: str, references: HeldOut, progress: Callable[[int, int], None]
) -> tuple[np.ndarray, HeldOut]:
    """The answers at `POSITIONS` of the references' positions, each as the last of a prefix, and these references."""
    batch = references.inputs[0]
    tokens = batch["input_ids"].shape[1]
    chosen = np.linspace(0, len(references.rows) - 1, min(POSITIONS, len(references.rows))).astype(np.int64)
    answers = []
    for at, row in enumerate(references.rows[chosen]):
        line, last = divmod(int(row), tokens)
        logits = run({name: array[line : line + 1, : last + 1] for name, array in batch.items()})
        answers.append(logits[output][0, -1, references.columns])
        progress(at + 1, len(chosen))
    quantized = references.quantized[chosen] if references.quantized.size else references.quantized
    kept = replace(
        references, rows=references.rows[chosen], source=references.source[chosen], quantized=quantized,
        source_perplexity=None, quantized_perplexity=None,
    )  # fmt: skip
    return np.stack(answers), kept


def _centered(rows: np.ndarray) -> np.ndarray:
    """Rows less their mean, in which logits and log probabilities are equal."""
    return rows - rows.mean(axis=-1, keepdims=True) if rows.size else rows


def _judged(row: OutputParity, why: str) -> OutputParity:
    return replace(row, passed=not why, why=why)


def _above(error: float, most: float) -> str:
    """That an error is too large; "" if it is not."""
    return "" if error <= most else f"L2 error {error:.3g} is above {most:.3g}"


def _outputs(
    reference: str, ours: np.ndarray, theirs: np.ndarray, gate: Gate, perplexity: float | None, other: float | None
) -> OutputParity:
    cosine, ratio = cosine_and_ratio(ours, theirs)
    norms = np.linalg.norm(theirs.astype(np.float64), axis=1)
    exact = np.linalg.norm(ours.astype(np.float64) - theirs, axis=1) <= EXACT * norms
    why = failure(gate, cosine, ratio)
    return OutputParity(
        reference,
        len(ours),
        finite_or(cosine),
        finite_or(ratio),
        finite_or(relative_l2(ours, theirs), 999.0),
        float(exact.mean()),
        perplexity,
        other,
        not why,
        why,
    )


def failure(gate: Gate, cosine: float, ratio: float) -> str:
    """Which of a gate's two conditions fails, with its figures; "" if both hold, NaN fails."""
    low, high = gate.norm
    if not cosine >= gate.cosine:
        return f"cosine {cosine:.6g} is below {gate.cosine:g}"
    return "" if low <= ratio <= high else f"norm ratio {ratio:.4g} is outside {low:g} to {high:g}"


def finite_or(value: float, instead: float = 0.0) -> float:
    """A finite value for the report: a value that is not finite failed its gate and is reported as the worst one."""
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
