"""Decide from headers whether a sensitivity run fits into memory."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.api.sensitivity.job import Job
from bridge.calibration.calibrate import free_memory
from bridge.calibration.data import Data
from bridge.calibration.walk.budget import USED, measuring_need, tokens_of
from bridge.core.errors import CalibrationError, UsageError
from bridge.core.text import size
from bridge.sources.memory import MemorySource


@dataclass(frozen=True)
class Room:
    """Whether the whole model fits, and two blocks at once. `needed`: bytes of the whole model."""

    whole: bool
    ahead: bool
    needed: int


def room_for(job: Job, data: Data, memory: int | None, device: str | None) -> Room:
    """What fits into `memory`, None for most of what is free; refuses what does not, before a weight is read.

    Raises:
        UsageError: a method that runs the whole model does not fit, or the largest block does not.
        CalibrationError: blocks cannot be run by a forward_loop.
    """
    if job.method == "block" and data.forward_loop is not None:
        raise CalibrationError(
            "method='block': a forward_loop runs the whole model, which is not in memory; give batches as data="
        )
    need = measuring_need(job.source.specs, job.source.config, job.schemes, tokens_of(data))
    resident = isinstance(job.source, MemorySource)
    budget = int(free_memory(device) * USED) if memory is None else memory
    given = f"{size(budget)}, what is free here" if memory is None else f"memory={size(budget)} (--memory)"
    whole = need.whole <= budget or (memory is None and resident)
    least = min(need.blocks, need.whole)
    if job.method != "block" and not whole:
        small = job.budget and job.budget.kind == "kl" and " and a budget of bits or bytes"
        block = f"method='block' (--method block){small or ''}, which takes {size(least)}"
        if least > budget:
            block = f"at least {least} bytes and {block}"
        raise UsageError(
            f"method={job.method!r} runs the whole model, which takes {size(need.whole)}, more than {given}; use "
            f"{block}, or give at least {need.whole} bytes"
        )
    if least > budget and not whole:
        raise UsageError(
            f"{given} is too little for method='block': {need.largest} has {size(need.largest_bytes)}, and with its "
            f"activations it takes {size(least)}; give at least {least} bytes, or fewer samples= (--samples)"
        )
    return Room(whole, not resident and need.blocks + need.largest_bytes <= budget, need.whole)
