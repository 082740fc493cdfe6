"""Turn calibration data of any form into batches of token ids.

No model is run, except the parts of a pipeline of diffusion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.calibration.data.batches import given
from bridge.calibration.data.checks import number_in
from bridge.calibration.data.digests import code_digest
from bridge.calibration.data.documents import documents
from bridge.calibration.data.prompted import prompted
from bridge.calibration.data.rows import rows_of
from bridge.calibration.data.values import AUTO, DEFAULT, MOST_SAMPLES, Data, Sampling
from bridge.core.errors import BridgeError, CalibrationError, UsageError
from bridge.sources.configs.diffusion import is_diffusion
from bridge.sources.source import Source


def prepare(data: Any, source: Source, sampling: Sampling = DEFAULT) -> Data:
    """Make `Data` of None (the embedded text), a text or JSONL file, a `datasets` id, batches, a DataLoader, texts, or
    a `forward_loop(model)`.

    >>> prepare("corpus.txt", open_source("examples/models/tiny-llama")).samples  # doctest: +SKIP
    32
    """
    if is_diffusion(source.config) and (data is None or isinstance(data, str | Path) or _are_texts(data)):
        return prompted(data, source, sampling)
    if sampling.samples == AUTO:
        return _automatic(data, source, sampling)
    if data is None:
        if sampling.field:
            raise UsageError(
                f"field={sampling.field!r} (--field) names a key of JSONL records; give them: data= (--data)"
            )
        return _default(source, sampling)
    if isinstance(data, str | Path):
        texts = documents(data, source.load_tokenizer, sampling.rows, sampling.field, sampling.characters)
        return rows_of(texts, source, str(data), sampling)
    if sampling.field:
        raise UsageError(f"field={sampling.field!r} (--field) names a key of JSONL records, and data= holds none")
    if callable(data) and not isinstance(data, Mapping) and not hasattr(data, "__iter__"):
        try:
            own = _default(source, sampling)
        except CalibrationError as error:  # the user did not give the text that this model cannot read
            own = Data(missing=f"a forward_loop was given, and {error}")
        return Data(held_out=own.held_out, digest=code_digest(data), missing=own.missing, forward_loop=data)
    items = [data] if isinstance(data, Mapping) or hasattr(data, "dtype") else data
    if not isinstance(items, Iterable):
        raise CalibrationError(
            f"cannot calibrate with {type(data).__name__}; give a text or JSONL file, a dataset id, texts, batches, a "
            "DataLoader, or a forward_loop(model)"
        )
    return given(items, source, sampling)


def _are_texts(data: Any) -> bool:
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(item, str) for item in data)


def _automatic(data: Any, source: Source, sampling: Sampling) -> Data:
    """Return the most rows that may be chosen, which are cut again when the number is known."""
    texts = isinstance(data, list | tuple) and all(isinstance(item, str) for item in data)
    if not (data is None or isinstance(data, str | Path) or texts):
        kind = type(data).__name__
        raise UsageError(
            f'samples="auto" chooses how many rows are cut from text; this {kind} is used as it is: leave out samples='
        )

    def cut(rows: int) -> Data:
        return prepare(data, source, replace(sampling, samples=rows))

    most = cut(MOST_SAMPLES)
    if not most.batches:
        return most
    digest = hashlib.sha256(f"{AUTO} {most.digest}".encode()).hexdigest()
    return replace(most, digest=digest, warnings=(), cut=cut)


def _default(source: Source, sampling: Sampling) -> Data:
    if number_in(source.config, "vocab_size") is None:
        why = "this model reads no text, so the embedded default text cannot calibrate it"
        hint = (
            'give batches of real inputs in Python, for images data=[{"pixel_values": tensor}, ...], or a saved --calib'
        )
        return Data(missing=f"{why}; {hint}")
    try:
        source.load_tokenizer()
    except BridgeError as error:
        return Data(missing=f"{error}; or give batches of token ids as calibration data")
    data = rows_of(documents(None, source.load_tokenizer, 1), source, "the embedded text", sampling)
    tokens = f"{data.samples * data.sequence:,} tokens"
    text = f"the data are {tokens} of Python's documentation; text like yours is better: data= (--data FILE)"
    return replace(data, warnings=(*data.warnings, text))
