"""The proof: re-reads what was written, dequantizes it, compares it with the source, runs it.

Gates are two-sided (cosine and norm ratio) and the scheme's own. Nothing here reads what the conversion held in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bridge.container import SafetensorsFile
from bridge.conversion import Progress, quiet
from bridge.errors import CannotRun, VerifyError, fold_layers
from bridge.planning import Plan, Step
from bridge.quant.answers import mean_perplexity, next_token_loss
from bridge.quant.bits import cast, smooth
from bridge.quant.compare import compare
from bridge.quant.grammar import Gate
from bridge.report import OutputParity, TensorParity
from bridge.sources import lazy
from bridge.values import Format, Numeric

if TYPE_CHECKING:
    from bridge.quant.calibration import HeldOut
    from bridge.sources import Source

WORKERS = 2


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
    plan: Plan, source: Source, gates: Mapping[str, Gate], weights: Path, progress: Progress = quiet
) -> tuple[TensorParity, ...]:
    """Compare every quantized weight in the file `weights` with the source; carried tensors must be equal to the bit.

    Args:
        gates: module -> the gate of its weight.
    """
    file = SafetensorsFile(weights)
    missing = [o.spec.name for o in plan.outputs if o.spec.name not in file.specs]
    if missing:
        raise VerifyError(f"{weights} lacks {', '.join(fold_layers(missing)[:8])}: not what the plan wrote")
    done = [0]

    def one(step: Step) -> TensorParity | None:
        parity = _quantized(step, plan, source, gates, file) if step.format else _carried(step, plan, source, file)
        done[0] += 1
        progress(done[0], len(plan.steps), "compare weights")
        return parity

    with ThreadPoolExecutor(WORKERS) as pool:
        return tuple(parity for parity in pool.map(one, plan.steps) if parity)


def _carried(step: Step, plan: Plan, source: Source, file: SafetensorsFile) -> TensorParity | None:
    """None where the tensor is what the plan says, to the bit."""
    if step.attention:
        return None
    output, spec = step.outputs[0].spec, plan.sources[step.source]
    bits = lazy(source, step.source).read()
    expected = bits if spec.dtype == output.dtype else cast(bits, spec.dtype, output.dtype)
    if expected.tobytes() == file.read(output.name).tobytes():
        return None
    return TensorParity(output.name, "carried", 0.0, 0.0, 0.0, 0.0, False)


def _quantized(
    step: Step, plan: Plan, source: Source, gates: Mapping[str, Gate], file: SafetensorsFile
) -> TensorParity:
    assert step.site and step.format
    spec = plan.sources[step.source]
    bits = lazy(source, step.source).read()
    arrays = {"codes" if o.part == "weight" else o.part: file.read(o.spec.name) for o in step.outputs}
    if "pre_quant_scale" in arrays:  # as the file has it: a wrong one would show as a wrong weight
        stored = next(o.spec.dtype for o in step.outputs if o.part == "pre_quant_scale")
        bits = smooth(bits, spec.dtype, cast(arrays["pre_quant_scale"], stored, "float32"), layout=step.site.layout)
    first = step.format.weight[0]
    if len(first.block) == 2:  # written once per `out`, see targets/trt.py
        arrays["scale"] = arrays["scale"][:, :: first.block[0]]
    parity = compare(bits, spec.dtype, arrays, step.format.weight, layout=step.site.layout, transpose=step.transpose)
    gate = gates[step.site.module]
    passed = _passes(gate, parity.cosine, parity.norm_ratio)
    if not parity.source:  # an all-zero weight has no direction; it must be written as zeros
        passed = not parity.decoded
    return TensorParity(
        step.site.weight,
        format_name(step.format),
        _finite(parity.cosine),
        _finite(parity.norm_ratio),
        _finite(min(max(parity.sqnr, -999.0), 999.0), -999.0),
        _finite(parity.worst, 999.0),
        passed,
    )


def format_name(format_: Format) -> str:
    """Short name of a format for tables: `w int4/128 a fp8`."""
    text = "w " + "+".join(_numeric_name(n) for n in format_.weight)
    return f"{text} a {_numeric_name(format_.input)}" if format_.input else text


def _numeric_name(numeric: Numeric) -> str:
    short = {"float8_e4m3fn": "fp8", "float4_e2m1fn": "fp4"}.get(numeric.dtype, numeric.dtype)
    return f"{short}/{'x'.join(map(str, numeric.block))}" if numeric.block else short


def output_parity(
    runtime: Runnable, held: HeldOut, gate: Gate, quantized: bool, progress: Progress = quiet
) -> tuple[OutputParity, ...]:
    """Run the written model on held-out inputs and compare with what the references answered.

    Against "source" the scheme's gate decides; an unquantized model must agree to float32 rounding. Against "modelopt"
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
        return (replace(ours, passed=ours.relative_l2 <= FLOAT_ERROR),)
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
