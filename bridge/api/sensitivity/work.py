"""Bound the work of measuring layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.api.sensitivity.job import Job
from bridge.calibration.requirements import is_cuda, measured_rate
from bridge.core.errors import warn
from bridge.core.text import duration, number
from bridge.core.values import main_dtype

# FLOP of ranking: some 5 minutes of one core at 2.5 GHz. On SmolLM2-135M the ranks of 128 tokens agree with those of
# 1,536 (Spearman 0.94), and three schemes for its 120 layers leave 69.
MOST, MOST_ON_CUDA = 4e12, 4e15
LEAST = 64  # tokens
SAID = 60.0  # seconds, from which the time is told
Batches = Sequence[Mapping[str, Any]]


def variants(job: Job) -> int:
    """How many runs of a batch rank the layers: one for each unit in each scheme that it fits."""
    return sum(len(candidate.bytes) for candidate in job.candidates.formats if candidate.scheme)


def flops_of_ranking(job: Job, tokens: int) -> float:
    """A run begins at the layer that is quantized: half of the layers on average, and the head."""
    sites = {site.weight for unit in job.units for site in unit.sites}
    inside = sum(job.source.specs[name].size for name in sites if name in job.source.specs)
    head = max((spec.size for name, spec in job.source.specs.items() if name not in sites), default=0)
    return 2.0 * tokens * variants(job) * (inside / 2 + head)


def rows_for_ranking(job: Job, held_out: Batches, device: str | None) -> Batches:
    """The held-out tokens that the work allows, at least `LEAST`: rows from the first, or the first one's begin.

    All of batches without ids.
    """
    if any("input_ids" not in batch for batch in held_out):
        return held_out
    most = MOST_ON_CUDA if is_cuda(device) else MOST
    allowed = max(LEAST, int(most / max(1.0, flops_of_ranking(job, 1))))
    if allowed >= tokens_of(held_out):
        return held_out
    kept: list[Mapping[str, Any]] = []
    left = allowed
    for batch in held_out:
        rows, length = batch["input_ids"].shape
        take, width = max(min(rows, left // length), int(not kept)), min(length, left if not kept else length)
        if not take:
            break
        kept.append({name: _cut(value, (rows, length), take, width) for name, value in batch.items()})
        left -= take * width
    return kept


def _cut(value: Any, shape: tuple[int, int], rows: int, width: int) -> Any:
    """The first rows and tokens of a tensor of a batch."""
    if value.shape[:2] == shape:
        return value[:rows, :width]
    return value[:rows] if value.shape[:1] == shape[:1] else value


def tokens_of(batches: Batches) -> int:
    return sum(int(batch["input_ids"].numel()) for batch in batches if "input_ids" in batch)


def tell_time(job: Job, rows: Batches, device: str | None) -> None:
    """Warn before a ranking of more than a minute: how many runs, and about how long."""
    tokens = tokens_of(rows)
    work = flops_of_ranking(job, tokens)
    if work < 1e11:
        return
    dtype = job.source.runs_in or main_dtype(job.source.specs.values())
    seconds = work / measured_rate(dtype, device)
    if seconds > SAID:
        warn(
            f"ranking {number(len(job.units), 'layer')}: {number(variants(job), 'run')} of {number(tokens, 'token')}, "
            f"{work / 1e15:.2g} PFLOP, {duration(seconds)}"
        )
