"""Turn calibration data of any form into batches of token ids.

No model is run, except the parts of a pipeline of diffusion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridge.calibration.data.checks import checked, code_digest, size, some_rows
from bridge.calibration.data.documents import documents
from bridge.calibration.data.rows import rows_of
from bridge.calibration.data.values import (
    AUTO,
    DEFAULT,
    DEFAULT_TEXT,
    EMBEDDED,
    HELD_OUT,
    MOST_SAMPLES,
    PROMPTED,
    Data,
    Sampling,
)  # fmt: skip
from bridge.core.errors import BridgeError, CalibrationError, UsageError
from bridge.core.text import number
from bridge.sources.configs.diffusion import is_diffusion
from bridge.sources.configs.positions import vocabulary_size
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.sources.checkpoint import HfSource


def prepare(data: Any, source: Source, sampling: Sampling = DEFAULT) -> Data:
    """Make `Data` of None (the embedded text), a text or JSONL file, a `datasets` id, batches, a DataLoader, texts, or
    a `forward_loop(model)`.

    >>> prepare("corpus.txt", open_source("examples/models/tiny-llama")).samples  # doctest: +SKIP
    32
    """
    if is_diffusion(source.config) and (data is None or isinstance(data, str | Path) or (are_texts(data) and data)):
        return _prompted(data, source, sampling)
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
    return _given(items, source, sampling)


def are_texts(data: Any) -> bool:
    """Whether data are a list of texts, which may be empty."""
    return isinstance(data, list | tuple) and all(isinstance(item, str) for item in data)


def _automatic(data: Any, source: Source, sampling: Sampling) -> Data:
    """Return the most rows that may be chosen, which are cut again when the number is known."""
    if not (data is None or isinstance(data, str | Path) or are_texts(data)):
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
    if vocabulary_size(source.config) is None:
        why = "this model reads no text, so the embedded default text cannot calibrate it"
        hint = (
            'give batches of real inputs in Python, for images data=[{"pixel_values": tensor}, ...], or a saved --calib'
        )
        return Data(missing=f"{why}; {hint}")
    try:
        source.load_tokenizer()
    except BridgeError as error:
        return Data(missing=f"{error}; or give batches of token ids as calibration data")
    data = rows_of(documents(None, source.load_tokenizer, 1), source, EMBEDDED, sampling)
    tokens = f"{data.samples * data.sequence:,} tokens"
    text = f"the data are {tokens} of {DEFAULT_TEXT}; text like yours is better: data= (--data FILE)"
    return replace(data, warnings=(*data.warnings, text))


def _given(items: Iterable[Any], source: Source, sampling: Sampling) -> Data:
    """Return `items` as data: texts are cut into rows, batches are used as they are."""
    import torch

    taken: list[dict[str, Any]] = []
    texts: list[str] = []
    rows = 0
    for at, item in enumerate(items):
        if isinstance(item, str):
            texts.append(item)
            continue
        batch = _batch(item, f"batch {at} of the calibration data", torch)
        taken.append(batch)
        rows += size(batch)
        if rows >= (sampling.rows if sampling.samples else 1024) + 1:  # a generator need not end
            break
    if texts and not taken:
        return rows_of(texts, source, "the calibration texts", sampling)
    if texts or not taken:
        what = "mixes texts and batches" if texts else "is empty"
        raise CalibrationError(f"the calibration data {what}; give texts, or batches of tensors")
    if len(taken) > 1:
        held = max(1, len(taken) // (HELD_OUT + 1))
        kept, out = taken[:-held], taken[-held:]
    else:
        if rows < 2:
            raise CalibrationError("one sample cannot both calibrate and be held out; give at least two")
        cut = rows - max(1, rows // (HELD_OUT + 1))
        kept, out = [some_rows(taken[0], slice(cut))], [some_rows(taken[0], slice(cut, None))]
    return replace(checked(tuple(kept), tuple(out), source, "the calibration data"), name="batches of the caller")


def _batch(item: Any, where: str, torch: Any) -> dict[str, Any]:
    """Return one batch as {name: tensor}; a bare tensor is ids if it has integers, pixels otherwise."""
    if isinstance(item, tuple) and item and not isinstance(item[0], int):
        item = item[0]  # (inputs, labels) of a DataLoader
    if isinstance(item, Mapping):
        inputs = {str(k): v for k, v in item.items() if v is not None and k not in ("labels", "label")}
        if not inputs:
            raise CalibrationError(f"{where}: {'has only labels' if item else 'is empty'}; give batches with inputs")
        batch = {key: _tensor(value, f"{where}, {key}", torch) for key, value in inputs.items()}
        if single := [key for key, tensor in batch.items() if not tensor.ndim]:
            raise CalibrationError(
                f"{where}, {single[0]}: a single number; give the tensors of one run by the names of the model's "
                'inputs, rows first, as in {"input_ids": ids}'
            )
        _check_mask(batch, where)
        return batch
    tensor = _tensor(item, where, torch)
    if tensor.is_floating_point():
        return {"pixel_values": tensor if tensor.ndim == 4 else tensor[None]}
    tensor = tensor if tensor.ndim == 2 else tensor[None]
    return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}


def _check_mask(batch: Mapping[str, Any], where: str) -> None:
    """CalibrationError for a mask of tokens that is not one number for each id; masks with more axes pass."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or mask is None or ids.ndim != 2 or mask.ndim > 2 or mask.shape == ids.shape:
        return
    raise CalibrationError(
        f"{where}: attention_mask {tuple(mask.shape)} does not match input_ids {tuple(ids.shape)}, and says of each "
        "token whether it is read; give it the shape of input_ids, or leave it out if no row is padded"
    )


def _tensor(value: Any, where: str, torch: Any) -> Any:
    try:
        return value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as cause:
        kind = type(value).__name__
        raise CalibrationError(f"{where}: {kind} cannot be made a tensor ({cause}); pad rows to one length") from cause


def _prompted(data: Any, source: Source, sampling: Sampling) -> Data:
    """Run the pipeline of `source` on prompts (None: the embedded ones) and take its denoiser's inputs as batches."""
    from bridge.sources.live_models.prompts import PROMPTS, STEPS, recorded

    if not source.folder:
        why = f"{source.config['architectures'][0]} alone takes no prompts; give the directory of its pipeline, or "
        missing = f"{why}batches of its inputs in Python: data=[{{'hidden_states': ..., 'timestep': ...}}, ...]"
        if data is None:
            return Data(missing=missing)
        raise CalibrationError(missing)
    _check_prompted(data, sampling)
    if isinstance(data, str | Path):
        texts = documents(data, source.load_tokenizer, sampling.rows, sampling.field, sampling.characters)
        prompts = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    else:
        prompts = PROMPTS if data is None else list(data)
    if len(prompts) < 2:
        raise CalibrationError("one prompt cannot both calibrate and be held out; give two or more, one a line")
    asked = sampling.samples if isinstance(sampling.samples, int) else PROMPTED
    *chosen, held = prompts[: asked + 1]
    *kept, out = recorded(cast("HfSource", source), [*chosen, held])
    batches = tuple(batch for steps in kept for batch in steps)
    made = checked(batches, (out[len(out) // 2],), source, "the prompts")
    return replace(made, samples=len(chosen), name=f"{number(len(chosen), 'prompt')} of {STEPS} steps each")


def _check_prompted(data: Any, sampling: Sampling) -> None:
    """UsageError for what prompts have no use for."""
    if sampling.samples == AUTO:
        raise UsageError('samples="auto" (--samples) chooses rows of text; a pipeline takes a number of prompts')
    if sampling.sequence:
        raise UsageError("sequence= (--sequence) cuts rows of text; leave it out: a pipeline takes whole prompts")
    if sampling.field and not isinstance(data, str | Path):
        raise UsageError(f"field={sampling.field!r} (--field) names a key of JSONL records; give them: data= (--data)")
