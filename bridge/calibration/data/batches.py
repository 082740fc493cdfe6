"""Take batches or texts of a caller, and hold some out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from bridge.calibration.data.checks import checked, size, some_rows
from bridge.calibration.data.rows import rows_of
from bridge.calibration.data.values import HELD_OUT, Data, Sampling
from bridge.core.errors import CalibrationError
from bridge.sources.source import Source


def given(items: Iterable[Any], source: Source, sampling: Sampling) -> Data:
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
