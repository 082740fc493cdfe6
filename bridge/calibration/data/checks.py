"""Check batches against the vocabulary and positions of their model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.calibration.data.digests import digest_of
from bridge.calibration.data.values import Data
from bridge.core.errors import CalibrationError
from bridge.sources.configs.diffusion import PLACES
from bridge.sources.configs.positions import positions
from bridge.sources.source import Source


def checked(
    batches: tuple[dict[str, Any], ...], held_out: tuple[dict[str, Any], ...], source: Source, where: str
) -> Data:
    """Return the batches as data; CalibrationError if the model cannot read them. `where`: what they are."""
    vocabulary, longest = number_in(source.config, "vocab_size"), positions(source.config)
    for batch in (*batches, *held_out):
        for name, tensor in batch.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise CalibrationError(f"{where}: {name} holds NaN or infinity")
        ids = batch.get("input_ids")
        if ids is None:
            continue
        if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            raise CalibrationError(f"{where}: input_ids {ids.dtype} {tuple(ids.shape)}; expected ids [batch, sequence]")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            raise CalibrationError(
                f"{where}: ids reach from {low} to {high}, the model's vocabulary ends at {vocabulary}: "
                "is it the tokenizer of this model?"
            )
        if longest is not None and ids.shape[1] > longest:
            raise CalibrationError(f"{where}: rows of {ids.shape[1]} tokens, the model has {longest} positions")
    length = max((b["input_ids"].shape[1] for b in batches if "input_ids" in b), default=0)
    return Data(batches, held_out, digest_of(batches), sum(map(size, batches)), int(length), name=where)


def size(batch: Mapping[str, Any]) -> int:
    """The number of rows of a batch."""
    first = next((tensor for name, tensor in batch.items() if name not in PLACES), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1


def some_rows(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """Some rows of a batch, whole where a denoiser's positions are the same for all."""
    return {name: tensor if name in PLACES else tensor[rows] for name, tensor in batch.items()}


def number_in(config: Mapping[str, Any], key: str) -> int | None:
    """Return a number of a config, or of that of its text model."""
    text = config.get("text_config")
    value = config.get(key) or (text.get(key) if isinstance(text, Mapping) else None)
    return value if type(value) is int else None
