"""Count how often data have each token: the score of a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bridge.calibration.data import Sampling, prepare
from bridge.calibration.data.documents import documents
from bridge.calibration.data.prepare import are_texts
from bridge.core.errors import CalibrationError
from bridge.sources.pruned.vocabulary import Vocabulary
from bridge.sources.source import Source


def token_counts(source: Source, vocabulary: Vocabulary, data: Any, sampling: Sampling) -> np.ndarray:
    """Return int64 [rows of the embedding]: all texts of `data` count, not only the rows that a model runs on.

    Raises:
        CalibrationError: there are no data, they name no tokens, or another tokenizer makes them.
    """
    if data is None:
        raise CalibrationError(
            "vocab keeps the tokens that your data use, and none are given: give text like yours, data= (--data FILE)"
        )
    texts = data if are_texts(data) else None
    if isinstance(data, str | Path):
        texts = documents(data, source.load_tokenizer, sampling.rows, sampling.field)
    if texts is None:
        prepared = prepare(data, source, sampling)
        found = [*prepared.batches, *prepared.held_out]
        if prepared.forward_loop or any("input_ids" not in batch for batch in found):
            raise CalibrationError(
                "vocab counts tokens, which these data do not name; give texts, or batches of input_ids"
            )
        rows: Iterable[Any] = (_ids(batch) for batch in found)
    else:
        tokenizer = source.load_tokenizer()
        own = tokenizer.get_vocab()
        if any(own.get(token) != number for token, number in vocabulary.ids.items()):
            raise CalibrationError(
                "the tokenizer that was given has other tokens than the model's tokenizer.json, which is cut: leave "
                "tokenizer= (--tokenizer) out"
            )
        rows = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts)
    counts = np.zeros(vocabulary.rows, np.int64)
    for numbers in rows:
        counts += np.bincount(np.asarray(numbers, np.int64), minlength=vocabulary.rows)[: vocabulary.rows]
    if not counts.any():
        raise CalibrationError("vocab keeps the tokens that the data use, and they have none; give more text")
    return counts


def _ids(batch: Any) -> np.ndarray:
    """The tokens of a batch that its mask keeps."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    found: np.ndarray = (ids if mask is None else ids[mask.bool()]).reshape(-1).cpu().numpy()
    return found
