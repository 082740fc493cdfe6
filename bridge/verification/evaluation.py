"""Measure what a written language model costs against its source.

KL divergence over the whole vocabulary, next-token losses of both, and how often both predict the same token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.calibration.data.windows import ERROR, POSITIONS, enough, evaluated_windows, further_windows, tokens_of
from bridge.calibration.reference_outputs import PIECE, divergence, proving
from bridge.core.errors import BridgeError, CannotRun, VerifyError
from bridge.core.machine import available_memory, returning_pages
from bridge.core.progress import Progress, no_progress
from bridge.core.values import code_bits
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration, HeldOut
from bridge.quant.schemes.bounds import divergence_bound
from bridge.sources.source import Source
from bridge.targets.target import Runnable
from bridge.verification.parity import KL, Evaluation

if TYPE_CHECKING:
    from bridge.calibration.source_logits import Logits

Batch = Mapping[str, np.ndarray]
Run = Callable[[Batch], Any]


@dataclass(frozen=True)
class Reference:
    """What a written model is evaluated against: text, and the source's logits; `exact`: they are float32.

    `whole`: so many tokens were asked for. `scored`: of the first batches, which tokens count; all of others.
    `seconds`: that the source took. `left`: windows that the text has beside these; `further` runs the source on some.
    """

    batches: Sequence[Batch]
    logits: Logits
    exact: bool
    whole: bool = False
    scored: Sequence[np.ndarray] = ()
    seconds: float = 0.0
    left: int = 0
    further: Callable[[int], Reference] | None = None


def batches_of(held: HeldOut, values: int, whole: bool = False) -> list[Batch]:
    """The batches to evaluate: windows, and the held-out rows too where they have fewer positions than wanted.

    `values`: of the model, which limit the windows above the least number. `whole`: take all of them and nothing else.
    """
    windows = evaluated_windows(held.windows, values, whole)
    batches = _of_windows(windows)
    return batches if enough(windows) or (whole and batches) else [*batches, *held.inputs]


@returning_pages()
def reference_of(source: Source, held: HeldOut, whole: bool = False, progress: Progress = no_progress) -> Reference:
    """Run the source in float32, or in its own dtype where memory does not hold that."""
    values = sum(spec.size for spec in source.specs.values())
    stored = sum(spec.nbytes for spec in source.specs.values())
    wide = stored >= 4 * values
    exact = wide or 4 * values + stored < available_memory()
    windows = evaluated_windows(held.windows, values, whole)
    left = held.windows[len(windows) :] if enough(windows) else ()

    def run_on(batches: list[Batch], windows: Sequence[Sequence[int]]) -> Reference:
        begin = time.perf_counter()
        logits = _logits(source, batches, exact and not wide, progress)
        scored = [np.array([window]) >= 0 for window in windows]
        return Reference(batches[: logits.count], logits, exact, whole, scored, time.perf_counter() - begin)

    def further(count: int) -> Reference:
        if (4 * values + stored if exact and not wide else stored) > available_memory():  # beside the written model
            raise CannotRun("memory does not hold the source beside the written model")
        return run_on(_of_windows(left[:count]), left[:count])

    return replace(run_on(batches_of(held, values, whole), windows), left=len(left), further=further)


def _of_windows(windows: Sequence[Sequence[int]]) -> list[Batch]:
    rows = [np.array([tokens_of(window)], np.int64) for window in windows]
    return [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in rows]


def _logits(source: Source, batches: Sequence[Batch], widened: bool, progress: Progress) -> Logits:
    """Load the source, `widened` to float32, and run it."""
    import torch

    from bridge.calibration.requirements import source_for
    from bridge.calibration.source_logits import source_logits

    given = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in batches]
    model = (source_for(source, "fp32") if widened else source).load_model()
    return source_logits(model, given, lambda done: progress(done, len(given), "run the source"))


@returning_pages()
def evaluated(run: Run, reference: Reference, computed: str = "", progress: Progress = no_progress) -> Evaluation:
    """Run the written model on the batches and compare its logits with the source's.

    It goes on with further windows where the error of the change of the loss is large, and these take no long time.
    The perplexity of the source stays that of the first batches, which other verbs and schemes have, too.
    """
    begin, first = time.perf_counter(), _run_on(run, reference, progress)
    seconds = reference.seconds + time.perf_counter() - begin
    sums = np.concatenate([first, *_further(run, reference, first, seconds, progress)])
    tokens, source_loss = float(sums[:, 0].sum()), first[:, 2].sum() / first[:, 0].sum()
    kl, kl_error = _mean(sums[:, 0], sums[:, 1])
    difference, error = _mean(sums[:, 0], sums[:, 3] - sums[:, 2])
    unsure = error > ERROR and reference.left <= len(sums) - len(first)
    return Evaluation(
        tokens=int(tokens),
        window=max(batch["input_ids"].shape[1] for batch in reference.batches),
        kl=kl,
        kl_error=kl_error,
        difference=difference,
        difference_error=error,
        agreement=float(sums[:, 4].sum() / tokens),
        perplexity=_perplexity(source_loss + difference),
        source_perplexity=_perplexity(source_loss),
        computed=", ".join(filter(None, [computed, "" if all(map(np.all, reference.scored)) else "answers alone"])),
        few=(tokens < POSITIONS or unsure) and not reference.whole,
    )


def _further(
    run: Run, reference: Reference, first: np.ndarray, seconds: float, progress: Progress
) -> tuple[np.ndarray, ...]:
    """The rows of further windows; () where they are not needed, take too long, or the source does not run again."""
    _, error = _mean(first[:, 0], first[:, 3] - first[:, 2])
    count = min(reference.left, further_windows(len(first), error, seconds))
    try:
        return (_run_on(run, reference.further(count), progress),) if reference.further and count else ()
    except (BridgeError, RuntimeError):  # torch's for want of memory: what was run stands
        return ()


def _run_on(run: Run, reference: Reference, progress: Progress) -> np.ndarray:
    """The rows of `_rows` of all batches; CannotRun if nothing is scored."""
    rows: list[np.ndarray] = []
    for at, batch in enumerate(reference.batches):
        output = run(batch)
        ids = batch["input_ids"]
        if output.shape[:2] != ids.shape:
            raise CannotRun("its outputs are not the logits of each position")
        rows += _rows(output, reference.logits, at, batch, reference.scored[at] if at < len(reference.scored) else None)
        del output
        progress(at + 1, len(reference.batches), "evaluate")
    sums = np.array(rows)
    if not sums[:, 0].sum():
        raise CannotRun("the text that is held out has no two tokens in a row")
    return sums


def judged(found: Evaluation, plan: Plan, gate: str = "") -> Evaluation:
    """The same with the verdict of a plan's scheme, or of the user's own bound, "kl=0.1"."""
    codes = [step.format.weight[0].dtype for step in plan.quantized if step.format]
    if not codes:
        return found
    own = gate.removeprefix(KL) if gate.startswith(KL) else ""
    bound = float(own) if own else divergence_bound(plan.scheme, min(map(code_bits, codes)))
    why = "" if found.kl <= bound else f"KL {found.kl:.3g} is above {bound:.2g} nats a token"
    return replace(found, bound=bound, passed=not why, why=why)


def _rows(output: Any, logits: Logits, at: int, batch: Batch, scored: np.ndarray | None) -> list[np.ndarray]:
    """Of each row of a batch: positions, and the sums of KL, of both losses, and of equal first tokens.

    scored: the tokens whose prediction counts, None for all.
    """
    import torch

    ids, mask = batch["input_ids"], batch.get("attention_mask")
    mask = np.ones(ids.shape, bool) if mask is None or mask.ndim > 2 else mask.astype(bool)
    values = output if isinstance(output, torch.Tensor) else torch.from_numpy(output)
    length, width = ids.shape[1], values.shape[-1]
    flat, rows = values.reshape(-1, width), []
    for row in range(len(ids)):
        keep = mask[row, 1:] & mask[row, :-1]
        keep = keep if scored is None else keep & scored[row, 1:]
        columns = np.zeros((4, length - 1))
        for begin in range(0, length - 1, step := max(1, PIECE // width)):
            part = slice(row * length + begin, row * length + min(begin + step, length - 1))
            targets = torch.from_numpy(ids[row, begin + 1 : begin + 1 + part.stop - part.start])
            columns[:, begin : begin + len(targets)] = _piece(logits.piece(at, part), flat[part], targets)
        rows.append(np.array([keep.sum(), *(columns * keep).sum(1)]))
    return rows


def _piece(plain: Any, other: Any, targets: Any) -> np.ndarray:
    """KL, both losses, and whether the first tokens are equal, at some positions."""
    import torch

    if plain.shape != other.shape:
        raise CannotRun(f"its vocabulary has {other.shape[-1]:,} tokens, that of the source {plain.shape[-1]:,}")
    same = plain.argmax(-1) == other.argmax(-1)
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (plain, other))
    chosen = [-logs.gather(-1, targets[:, None])[:, 0] for logs in (p, q)]
    found: np.ndarray = torch.stack([divergence(p, q), *chosen, same.double()]).numpy()
    if not np.isfinite(found).all():
        whose = "the source's" if not bool(torch.isfinite(p).all()) else "its"
        raise (CannotRun if whose != "its" else VerifyError)(f"{whose} outputs are NaN or infinite on the text")
    return found


def _mean(counts: np.ndarray, sums: np.ndarray) -> tuple[float, float]:
    """The mean a token, and its standard error over rows, whose tokens depend on each other."""
    total, rows = counts.sum(), len(counts)
    mean = sums.sum() / total
    spread = math.sqrt(float(((sums - mean * counts) ** 2).sum()) * rows / max(1, rows - 1)) / total
    return float(mean), float(spread)


def _perplexity(loss: float) -> float:
    return math.exp(min(float(loss), 700.0))


def candidate(
    runtime: Runnable, plan: Plan, calibration: Calibration | None, source: Source, exact: bool
) -> tuple[Run, str, str]:
    """What runs a written model on a batch, in words what it is, and why its inputs are not quantized as they should.

    A program that gives outputs of one position a run has its weights run in torch. `exact`: in float32.
    """
    import torch

    decoded, said, why = getattr(runtime, "decoded", None), "", ""
    model: Any = getattr(runtime, "model", None)
    if decoded is None and not isinstance(model, torch.nn.Module):
        return lambda batch: runtime.run(batch)[runtime.outputs[0]], "", ""
    model = decoded().load_model() if decoded else model
    model = model.float() if exact else model
    try:
        said = "" if decoded else quantize_inputs(model, plan, calibration, source)
    except CannotRun as error:
        said, why = "inputs not quantized", f"inputs were evaluated unquantized: {error}"
    run = proving(model)

    def run_torch(batch: Batch) -> Any:
        return run({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()})

    words = ["its weights in torch" if decoded else "", "float32" if exact else "", said]
    return run_torch, ", ".join(filter(None, words)), why


def quantize_inputs(model: Any, plan: Plan, calibration: Calibration | None, source: Source) -> str:
    """Quantize the inputs of a model as the plan does; return how that is said, "" where none are quantized.

    CannotRun: no module of the model has some of the inputs alone.
    """
    if not any(step.format and step.format.input for step in plan.quantized):
        return ""
    from bridge.core.errors import BridgeError
    from bridge.planning.structure import structure_of
    from bridge.sources.live_models.checkpoint_names import live_names, tied_names
    from bridge.verification.simulated.inputs import FakeInputs, input_codes

    try:
        origins, tied = live_names(model, source.specs), tied_names(model)
        FakeInputs(model, input_codes(plan, calibration, structure_of(source), origins, tied))
    except (BridgeError, KeyError) as error:
        raise CannotRun(str(error)) from error
    return "inputs quantized"
