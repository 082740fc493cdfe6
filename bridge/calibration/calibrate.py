"""Calibrate a model: whole, or block by block where memory is small."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from bridge.calibration.data import Data
from bridge.calibration.modelopt import PACKAGES, check_data, check_device, fake_quantize, fingerprint
from bridge.calibration.quantizers import calibrator
from bridge.calibration.walk.budget import USED, by_blocks, calibration_need, tokens_of
from bridge.calibration.walk.device import device_of, home_of
from bridge.calibration.walk.workers import Workers, check_same
from bridge.core.errors import CalibrationError
from bridge.core.machine import available_memory
from bridge.core.progress import Progress, no_progress
from bridge.core.values import Structure, TensorSpec
from bridge.core.version import installed
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme, is_calibrated
from bridge.sources.memory import MemorySource
from bridge.sources.source import Source

JOINED = {"max", "mse", "smoothquant", "awq"}  # algorithms whose statistics `walk.join` puts together


def calibrate(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    data: Data,
    *,
    device: str | None = None,
    progress: Progress | None = None,
    needed: Collection[str] | None = None,
    memory: int | None = None,
    partial: Path | None = None,
    workers: Workers | None = None,
) -> Calibration:
    """Run the model of `source`, with ModelOpt where the scheme needs it, and return its statistics.

    The model is not changed. `memory`: bytes that the run may take; None: most of what is free. Above it the model runs
    block by block, with the same result. `needed`: modules that will be quantized. `partial`: a directory that keeps
    finished blocks meanwhile, so that a killed run goes on. `workers`: processes that share the batches; the model runs
    block by block then, since they meet at each.

    Raises:
        CalibrationError: before the model is loaded if data or CUDA are missing.
        UsageError: `memory` does not hold the largest block.
    """
    check_device(scheme, device)
    check_data(scheme, data)
    report = progress or no_progress
    if workers:
        return _together(source, structure, scheme, data, device, report, needed, memory, partial, workers)
    found = calibration_need(_in_memory(source), source.config, scheme, tokens_of(data))
    cut, weighted, made = runs_by_blocks(source, scheme, data, memory, device), _weighted(scheme), None
    if cut and (scheme.needs_modelopt or not weighted):
        from bridge.calibration.walk.run import calibrate_by_blocks

        budget = memory if memory is not None else int(available_memory() * USED)
        device = device or home_of(source)
        ahead = not isinstance(source, MemorySource) and found.blocks + found.largest_bytes <= budget
        made = calibrate_by_blocks(source, structure, scheme, data, device, report, needed, partial, ahead)
    elif scheme.needs_modelopt or not weighted:
        made = fake_quantize(source, structure, scheme, data, device=device, progress=report, needed=needed).calibration
    if made and not weighted:
        return made
    from bridge.calibration.importance import measure_importance  # a run of its own, of the plain model

    return measure_importance(
        source, structure, scheme, data, device=device, progress=report, needed=needed, beside=made, by_blocks=cut
    )


def _together(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    data: Data,
    device: str | None,
    report: Progress,
    needed: Collection[str] | None,
    memory: int | None,
    partial: Path | None,
    workers: Workers,
) -> Calibration:
    """Calibrate with this process's share of the batches; every process returns the same."""
    from bridge.calibration.walk.run import calibrate_by_blocks

    if why := _not_shared(scheme, data):
        raise CalibrationError(f"{why}; calibrate in one process (workers=1, or without torchrun)")
    check_same(workers, _arguments(source, structure, scheme, data, device, partial))
    here = workers.neighbours()
    own = replace(data, batches=tuple(batch for _, batch in workers.share(data.batches)))
    found = calibration_need(_in_memory(source), source.config, scheme, tokens_of(own))
    device = device_of(device or home_of(source), here.index(workers.rank))
    free = _free(device) // (1 if str(device or "").startswith("cuda") else len(here))
    by_blocks(found, memory, free)  # refuses what does not fit
    ahead = found.blocks + found.largest_bytes <= (int(free * USED) if memory is None else memory)
    progress = report if workers.first else no_progress
    made = calibrate_by_blocks(
        source, structure, scheme, data, device, progress, needed, partial and workers.own_directory(partial),
        ahead and not isinstance(source, MemorySource), workers,
    )  # fmt: skip
    check_same(workers, {"calibration": made.digest})
    return made


def _not_shared(scheme: Scheme, data: Data) -> str:
    """Why several processes cannot share a calibration; "" if they can."""
    if data.forward_loop is not None:
        return "a forward_loop runs the whole model, so that its data cannot be shared; give batches as data="
    if _weighted(scheme):
        return f"scheme {scheme.name}: an importance matrix is collected from the whole model"
    if other := sorted({calibrator(form) for form in scheme.formats if is_calibrated(form)} - JOINED):
        return f"scheme {scheme.name}: what {', '.join(other)} collects cannot be joined from several processes"
    return ""


def _arguments(
    source: Source, structure: Structure, scheme: Scheme, data: Data, device: str | None, partial: Path | None
) -> dict[str, str]:
    """What has to be the same in all processes, by the word of the caller."""
    return {
        "model": fingerprint(structure, source),
        "quant": scheme.digest,
        "data": data.digest,
        "device": str(device).partition(":")[0],
        "partial": str(partial is not None),
        "compute": str(getattr(source, "runs_in", "")),
        "version of nvidia-modelopt, qbridge, torch or transformers": repr([installed(name) for name in PACKAGES]),
    }


def _weighted(scheme: Scheme) -> bool:
    return any(form.weighted for form in scheme.formats)


def runs_by_blocks(source: Source, scheme: Scheme, data: Data, memory: int | None, device: str | None) -> bool:
    """Whether the calibration goes block by block; reads headers, and refuses what no way fits."""
    found = calibration_need(_in_memory(source), source.config, scheme, tokens_of(data))
    driven, resident = data.forward_loop is not None, isinstance(source, MemorySource)
    return by_blocks(found, memory, _free(device), driven=driven, resident=resident)


def _in_memory(source: Source) -> Mapping[str, TensorSpec]:
    """The tensors in the dtype that the model runs in, which `compute=` may choose."""
    dtype = getattr(source, "runs_in", "")
    return {name: replace(spec, dtype=dtype) for name, spec in source.specs.items()} if dtype else source.specs


def _free(device: str | None) -> int:
    """Return the free memory of the machine, or of the CUDA device that holds the model."""
    if not str(device or "").startswith("cuda"):
        return available_memory()
    import torch

    return int(torch.cuda.mem_get_info(torch.device(str(device)))[0])
