"""Calibrate a model: whole, or block by block where memory is small."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.calibration.data import Data
from bridge.calibration.modelopt import PACKAGES, check_data, check_device, fake_quantize, fingerprint
from bridge.calibration.quantizers import calibrator
from bridge.calibration.walk.budget import Need, by_blocks, calibration_need, memory_of, tokens_of
from bridge.calibration.walk.workers.device import device_of, home_of
from bridge.calibration.walk.workers.processes import Workers, check_same
from bridge.core.errors import CalibrationError
from bridge.core.machine import available_memory
from bridge.core.progress import Progress, no_progress
from bridge.core.text import size
from bridge.core.values import Structure, TensorSpec
from bridge.core.version import installed
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme, is_calibrated
from bridge.sources.memory import MemorySource
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.calibration.walk.states import Spill
JOINED = {"max", "mse", "smoothquant", "awq"}  # algorithms whose statistics `walk.workers.join` puts together


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
    cut, weighted, made = runs_by_blocks(source, scheme, data, memory, device), _weighted(scheme), None
    spill = spill_of(source, scheme, data, memory, device, partial) if cut else None
    if cut and (scheme.needs_modelopt or not weighted):
        from bridge.calibration.walk.run import calibrate_by_blocks

        found, budget = _need(source, scheme, data, device), memory_of(memory, free_memory(device))
        device = device or home_of(source)
        ahead = not isinstance(source, MemorySource) and found.blocks + found.largest_bytes <= budget
        room = found.room(budget)
        made = calibrate_by_blocks(source, structure, scheme, data, device, report, needed, partial, ahead, spill, room)
    elif scheme.needs_modelopt or not weighted:
        made = fake_quantize(source, structure, scheme, data, device=device, progress=report, needed=needed).calibration
    if made and not weighted:
        return made
    from bridge.calibration.importance import measure_importance  # a run of its own, of the plain model

    return measure_importance(
        source, structure, scheme, data, device=device, progress=report, needed=needed, beside=made, by_blocks=cut,
        spill=spill,
    )  # fmt: skip


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
    found = _need(source, scheme, own, device).uncut  # sums over the experts of a layer are not joined
    device = device_of(device or home_of(source), here.index(workers.rank))
    free = free_memory(device) // (1 if str(device or "").startswith("cuda") else len(here))
    by_blocks(found, memory, free)  # refuses what does not fit
    budget = memory_of(memory, free)
    ahead = found.blocks + found.largest_bytes <= budget and not isinstance(source, MemorySource)
    kept = partial and workers.own_directory(partial)
    progress = report if workers.first else no_progress
    made = calibrate_by_blocks(
        source, structure, scheme, data, device, progress, needed, kept, ahead, _spill(found, budget, kept),
        workers=workers,
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
    driven, resident = data.forward_loop is not None, isinstance(source, MemorySource)
    found = _need(source, scheme, data, device)
    return by_blocks(found, memory, free_memory(device), driven=driven, resident=resident)


def told_of_blocks(source: Source, scheme: Scheme, data: Data, memory: int | None, device: str | None) -> str:
    """Say that free memory sends the model through in blocks, with both figures; "" if the caller chose, or it fits."""
    if memory is not None or not runs_by_blocks(source, scheme, data, memory, device):
        return ""
    found, budget = _need(source, scheme, data, device), memory_of(memory, free_memory(device))
    spilled = found.states - found.share(budget)
    files = f", with {size(spilled)} of activations in files" if spilled else ""
    return (
        f"the calibration runs block by block, because the whole model takes {size(found.whole)} of memory and "
        f"{size(budget)} of what is free here may be used (memory=, --memory); blocks take "
        f"{size(min(found.blocks, budget))}{files}"
    )


def spill_of(
    source: Source, scheme: Scheme, data: Data, memory: int | None, device: str | None, partial: Path | None
) -> Spill | None:
    """Where a calibration block by block keeps activations that memory does not hold; None if it holds all.

    Reads headers; UsageError if the disk has no room.
    """
    return _spill(_need(source, scheme, data, device), memory_of(memory, free_memory(device)), partial)


def _spill(found: Need, budget: int, partial: Path | None) -> Spill | None:
    share = found.share(budget)
    if share >= found.states:
        return None
    from bridge.calibration.walk.states import spill_to

    # finished blocks keep their outputs twice in turn
    return spill_to(partial, share, found.states - share, 0 if partial is None else found.states)


def _need(source: Source, scheme: Scheme, data: Data, device: str | None) -> Need:
    found = calibration_need(_in_memory(source), source.config, scheme, tokens_of(data))
    if data.cut:
        found = found.uncut  # the choice of samples looks into whole layers
    if str(device or "").startswith("cuda"):  # activations of a GPU have no files
        found = replace(found, in_files=found.blocks, by_expert_in_files=found.by_expert)
    return found


def _in_memory(source: Source) -> Mapping[str, TensorSpec]:
    """The tensors in the dtype that the model runs in, which `compute=` may choose."""
    dtype = getattr(source, "runs_in", "")
    return {name: replace(spec, dtype=dtype) for name, spec in source.specs.items()} if dtype else source.specs


def free_memory(device: str | None) -> int:
    """Return the free memory of the machine, or of the CUDA device that holds the model."""
    if not str(device or "").startswith("cuda"):
        return available_memory()
    import torch

    return int(torch.cuda.mem_get_info(torch.device(str(device)))[0])
