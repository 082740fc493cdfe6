"""Measure what pruning costs, on the windows that `convert` evaluates on."""

from __future__ import annotations

import math
from dataclasses import replace

from bridge.calibration.data import Data
from bridge.calibration.data.values import EMBEDDED
from bridge.calibration.data.windows import enough, evaluated_windows, tokens_of
from bridge.calibration.importance.measure import perplexity_of
from bridge.calibration.modelopt import import_frameworks
from bridge.calibration.requirements import source_for
from bridge.core.errors import CalibrationError
from bridge.planning.structure import structure_of
from bridge.quant.calibration import HeldOut
from bridge.sources.pruned.source import PrunedSource
from bridge.sources.source import Source

MOST = 700.0  # nats that stand for infinity in a report


def measure_change(smaller: PrunedSource, data: Data, device: str | None = None) -> None:
    """Note the perplexities of the whole model and of the pruned one, in float32; none if they predict no next token.

    If tokens were cut, both are a token of the whole model, on the same text.

    Raises:
        CalibrationError: nothing is held out, or a model cannot be run on it.
    """
    if smaller.vocabulary and data.name == EMBEDDED:
        raise CalibrationError("tokens were cut for other text than the embedded one; give yours, data= (--data FILE)")
    import_frameworks(with_modelopt=False)
    smaller.perplexity = ()
    held = on_windows(data, smaller.whole)
    if not held.held_out:
        raise CalibrationError(data.missing or "no inputs are held out")
    whole = _of_whole(held, smaller) if smaller.vocabulary else held
    before, after = _loss(smaller.whole, whole, device), _loss(smaller, held, device)
    if before is not None:  # the loss of a broken model is None, too
        share = _predicted(held) / _predicted(whole) if smaller.vocabulary else 1.0
        after = MOST if after is None else min(MOST, after * share)
        smaller.perplexity = (math.exp(before), math.exp(after))


def on_windows(data: Data, source: Source) -> Data:
    """The data with the windows that `convert` evaluates this model on, of equal rows, as held-out inputs."""
    import torch

    windows = evaluated_windows(data.windows, sum(spec.size for spec in source.specs.values()))
    rows = [torch.tensor([tokens_of(window)], dtype=torch.int64) for window in windows]
    batches = tuple({"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows)
    return replace(data, batches=(), held_out=batches if enough(windows) else (*batches, *data.held_out))


def data_of_held(held: HeldOut) -> Data:
    """What a calibration holds out, as data."""
    import torch

    batches = tuple({name: torch.from_numpy(array) for name, array in batch.items()} for batch in held.inputs)
    return Data(held_out=batches, windows=tuple(tuple(window) for window in held.windows))


def _of_whole(held: Data, smaller: PrunedSource) -> Data:
    """The same texts in the tokens of the whole model."""
    import torch

    ours, theirs = smaller.load_tokenizer(), smaller.whole.load_tokenizer()
    texts = [ours.decode(row, skip_special_tokens=True) for batch in held.held_out for row in batch["input_ids"]]
    ids = [torch.tensor([theirs(text)["input_ids"]], dtype=torch.int64) for text in texts]
    return replace(held, held_out=tuple({"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids))


def _loss(source: Source, held: Data, device: str | None) -> float | None:
    """The mean loss of a next token; None if the model predicts none, or gives no number."""
    found = perplexity_of(source_for(source, "fp32"), structure_of(source), held, device)
    return None if found is None else math.log(found)


def _predicted(held: Data) -> int:
    return sum(batch["input_ids"].shape[0] * (batch["input_ids"].shape[1] - 1) for batch in held.held_out)
