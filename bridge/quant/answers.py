"""What a model answers to held-out inputs: a bounded sample of its outputs, and its perplexity; changes no model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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
    import torch

    kind = type(model).__name__
    if not ("ForCausalLM" in kind or kind.endswith("LMHeadModel")):
        return None
    total, count = 0.0, 0
    for batch in batches:
        ids, logits = batch["input_ids"], run(batch)
        keep = batch.get("attention_mask", torch.ones_like(ids))[:, 1:].bool()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1][keep], ids[:, 1:][keep].cpu(), reduction="sum")
        total, count = total + float(loss), count + int(keep.sum())
    return math.exp(min(total / count, 700.0)) if count else None


def as_arrays(batches: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], ...]:
    """Batches as NumPy arrays: integers as int64, the rest as float32."""
    return tuple(
        {name: t.numpy().astype(np.float32 if t.is_floating_point() else np.int64) for name, t in batch.items()}
        for batch in batches
    )
