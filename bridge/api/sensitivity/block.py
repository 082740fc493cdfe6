"""Measure the cost of each unit by the error of its block."""

from __future__ import annotations

from bridge.api.sensitivity.job import Job
from bridge.api.sensitivity.measure import Costs, structure_in
from bridge.calibration.data import Data
from bridge.calibration.job import CalibrationJob
from bridge.calibration.requirements import check_device
from bridge.calibration.walk.block_errors import ALL, BlockErrors, measure_block_errors
from bridge.core.progress import Progress
from bridge.core.values import CACHE


def block_costs(job: Job, data: Data, device: str | None, report: Progress, ahead: bool) -> Costs:
    """Walk over the blocks once for each scheme; a unit in several blocks costs the sum of their errors."""
    for scheme in job.schemes:
        check_device(scheme, device)
    found = [
        measure_block_errors(
            CalibrationJob(job.source, structure_in(job, at), scheme, data, device, report), job.modules, ahead
        )
        for at, scheme in enumerate(job.schemes)
    ]
    errors = {
        (unit.name, at): error
        for at, one in enumerate(found)
        for unit in job.units
        if (error := one.of(unit.name)) is not None
    }
    cache = found[0].of(CACHE)
    # only the first scheme has the KV cache; errors of one block nearly add up
    wholes = [_sum(one) + (cache.error if cache and at else 0.0) for at, one in enumerate(found)]
    return Costs(
        {key: error.error for key, error in errors.items()},
        tuple(wholes),
        cache.error if cache else None,
        found[0].tokens,
        max(one.held for one in found),
        {key: error.cosine for key, error in errors.items()},
    )


def _sum(errors: BlockErrors) -> float:
    total = errors.of(ALL)
    return total.error if total else 0.0
