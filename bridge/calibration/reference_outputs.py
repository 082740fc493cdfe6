"""What a model answers to held-out inputs: a bounded sample of its outputs, and its perplexity; changes no model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.errors import CalibrationError
from bridge.quant.calibration import HeldOut
from bridge.quant.data import Data

if TYPE_CHECKING:
    from bridge.sources import Source

VALUES = 1 << 19  # 2 MB of float32 for each model's answers
COLUMNS = 4096  # of a vocabulary; at least 128 positions fit then
Run = Callable[[Mapping[str, Any]], Any]


def answer(source: Source, data: Data) -> HeldOut:
    """The source model's answers to the held-out inputs, without those of a fake-quantized model."""
    if not data.held_out:
        raise CalibrationError(data.missing or "no inputs were held out")
    model = source.load_model()
    run = runner(model)
    first = run(data.held_out[0])
    rows, columns = sample(first, data.held_out[0])
    loss = perplexity(run, data.held_out, model)
    empty = np.empty((rows.size, 0), np.float32)
    return HeldOut(as_arrays(data.held_out), rows, columns, pick(first, rows, columns), empty, loss, None)


def answer_again(source: Source, held: HeldOut) -> HeldOut:
    """The same inputs answered by `source` as it is now; ModelOpt's answers stay those of the calibration."""
    import torch

    batches = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in held.inputs]
    model = source.load_model()
    run = runner(model)
    answers = pick(run(batches[0]), held.rows, held.columns)
    return replace(held, source=answers, source_perplexity=perplexity(run, batches, model))


def runner(model: Any) -> Run:
    """A function from a batch to output 0 of `model` in float32, in evaluation mode without gradients.

    The training flags of all modules are put back, also after an exception.
    """
    import torch

    cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def run(batch: Mapping[str, Any]) -> Any:
        training = [module for module in model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            with torch.no_grad():
                output = model(**{name: tensor.to(device) for name, tensor in batch.items()}, **cache)
        finally:
            for module in training:
                module.training = True
        first = output if isinstance(output, torch.Tensor) else output[0]
        return first.detach().float().cpu()

    return run


def sample(output: Any, batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Which rows (of the flattened leading axes) and columns of an output are kept; padding is left out."""
    width = int(output.shape[-1])
    columns = np.arange(width) if width <= COLUMNS else np.linspace(0, width - 1, COLUMNS).astype(np.int64)
    count = output.numel() // width
    mask = batch.get("attention_mask")
    rows = np.arange(count)
    if mask is not None and mask.numel() == count:
        rows = np.flatnonzero(mask.reshape(-1).numpy())
    return rows[: max(64, VALUES // columns.size)].astype(np.int64), columns.astype(np.int64)


def pick(output: Any, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The kept part of an output, float32."""
    flat = output.reshape(-1, output.shape[-1]).numpy()
    return np.ascontiguousarray(flat[rows][:, columns], np.float32)


def perplexity(run: Run, batches: Sequence[Mapping[str, Any]], model: Any) -> float | None:
    """exp of the mean next-token loss; None for a model that does not predict the next token."""
    kind = type(model).__name__
    if not ("ForCausalLM" in kind or kind.endswith("LMHeadModel")):
        return None
    return mean_perplexity(next_token_loss(run(batch).numpy(), arrays) for batch, arrays in _with_arrays(batches))


def next_token_loss(logits: np.ndarray, batch: Mapping[str, np.ndarray]) -> tuple[float, int]:
    """Sum of the negative log-likelihoods of the next tokens, and their number; padding is left out on both sides."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", np.ones_like(ids)).astype(bool)
    keep = mask[:, 1:] & mask[:, :-1]
    shifted = logits[:, :-1].astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    chosen = np.take_along_axis(shifted, ids[:, 1:, None], -1)[..., 0]
    return float(((np.log(np.exp(shifted).sum(-1)) - chosen) * keep).sum()), int(keep.sum())


def mean_perplexity(losses: Iterable[tuple[float, int]]) -> float | None:
    """exp of the mean of (sum, count) pairs, at most e^700; None where nothing was predicted."""
    pairs = list(losses)
    count = sum(n for _, n in pairs)
    mean = sum(loss for loss, _ in pairs) / count if count else 0.0
    return math.exp(min(mean, 700.0)) if count and math.isfinite(mean) else None


def _with_arrays(batches: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], dict[str, np.ndarray]]]:
    yield from zip(batches, as_arrays(batches), strict=True)


def as_arrays(batches: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], ...]:
    """Batches as NumPy arrays: integers as int64, the rest as float32."""
    return tuple(
        {name: t.numpy().astype(np.float32 if t.is_floating_point() else np.int64) for name, t in batch.items()}
        for batch in batches
    )
