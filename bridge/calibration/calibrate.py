"""Calibrate a model: whole, or block by block where memory is small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.calibration.data import Data
from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import PACKAGES, fake_quantize, fingerprint
from bridge.calibration.quantizers import calibrator
from bridge.calibration.requirements import check_data, check_device, device_of, home_of, is_cuda, model_in_memory
from bridge.calibration.walk.budget import Need, by_blocks, calibration_need, memory_of, stacked_bytes, tokens_of
from bridge.calibration.walk.workers.processes import Workers, check_same
from bridge.core.errors import CalibrationError, UsageError
from bridge.core.machine import available_memory
from bridge.core.progress import no_progress
from bridge.core.text import size
from bridge.core.values import TensorSpec, main_dtype
from bridge.core.version import versions_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme, is_calibrated
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.calibration.walk.states import Spill
JOINED = {"max", "mse", "smoothquant", "awq"}  # algorithms whose statistics `walk.workers.join` puts together


@dataclass(frozen=True)
class Strategy:
    """How a calibration runs, decided from headers and one look at free memory.

    `memory`: what the caller allows, None for most of `free`. `blocks`: block by block. `device`: None for the CPU.
    `resident`: the model is in memory already.
    """

    need: Need
    memory: int | None
    free: int
    blocks: bool
    device: str | None
    resident: bool = False

    @property
    def budget(self) -> int:
        """The bytes that the calibration may take."""
        return memory_of(self.memory, self.free)

    @property
    def ahead(self) -> bool:
        """Whether the next block is read while one runs; a model in memory is not read."""
        return not self.resident and self.need.blocks.held + self.need.blocks.nbytes <= self.budget

    def message(self) -> str:
        """Say that free memory sends the model through in blocks, with both figures; "" if the caller chose."""
        if self.memory is not None or not self.blocks:
            return ""
        spilled = self.need.states - self.need.share(self.budget)
        files = f", with {size(spilled)} of activations in files" if spilled else ""
        return (
            f"the calibration runs block by block, because the whole model takes {size(self.need.whole)} of memory and "
            f"{size(self.budget)} of what is free here may be used (memory=, --memory); blocks take "
            f"{size(min(self.need.blocks.held, self.budget))}{files}"
        )

    def spill(self, partial: Path | None, sharing: int = 1) -> Spill | None:
        """Where a run by blocks keeps activations that memory does not hold; None if it holds all.

        UsageError if the disk has no room for all that the run writes; `sharing`: processes that write there.
        """
        from bridge.calibration.walk.states import spill_to

        if self.need.offloaded and self.need.offloaded > (free := available_memory() // sharing):
            raise UsageError(
                f"{size(self.need.offloaded)} of activations wait in the host's memory, of which {size(free)} is free; "
                "give fewer samples= (--samples)"
            )
        share = self.need.share(self.budget)
        kept = 0 if partial is None else self.need.states  # finished blocks keep their outputs twice in turn
        spare = max(0, self.budget - self.need.blocks.held)
        return spill_to(partial, share, self.need.states - share, self.need.codes, kept, spare, sharing)


def choose_strategy(job: CalibrationJob, whole_layers: bool = False) -> Strategy:
    """Decide how to calibrate; reads headers, and refuses what no strategy fits.

    `whole_layers`: the experts of a layer do not run one by one.
    """
    source, data = job.source, job.data
    device, resident = job.device or home_of(source), model_in_memory(source) is not None
    free = free_memory(device) if job.free is None else job.free
    specs = specs_in_memory(source)
    need = calibration_need(specs, source.config, job.scheme, tokens_of(data), job.structure.sites)
    if resident:
        need = replace(need, whole=need.whole - stacked_bytes(specs.values()))  # nothing is loaded
    if data.cut or whole_layers:
        need = need.uncut  # the choice of samples looks into whole layers
    need = need.on_device if is_cuda(device) else replace(need, offloaded=0)
    # the float32 copy of a model in memory is not there yet
    loaded = resident and source.runs_in in ("", main_dtype(source.specs.values()))
    blocks = by_blocks(need, job.memory, free, driven=data.forward_loop is not None, resident=loaded)
    return Strategy(need, job.memory, free, blocks, device, resident)


def calibrate(job: CalibrationJob) -> Calibration:
    """Run the model, with ModelOpt where the scheme needs it, and return its statistics.

    Above `job.memory` the model runs block by block, with the same result, and so it does with workers, which meet at
    each block.

    Raises:
        CalibrationError: before the model is loaded if data or CUDA are missing.
        UsageError: `job.memory` does not hold the largest block, or the disk has no room.
    """
    scheme = job.scheme
    check_device(scheme, job.device)
    check_data(scheme, job.data)
    if job.workers:
        return _calibrate_share(job, job.workers)
    if any(form.learned for form in scheme.formats) and job.data.forward_loop is not None:
        raise CalibrationError(
            f"scheme {scheme.name}: SignRound learns layer by layer, and a forward_loop runs the whole model; give "
            "batches as data="
        )
    strategy, weighted, made = choose_strategy(job), _weighted(scheme), None
    # of our GPTQ the products of inputs of one block are held at a time, if nothing else drives the model
    grams = any(form.ordered for form in scheme.formats) and job.data.forward_loop is None
    spill = strategy.spill(job.partial) if strategy.blocks or grams else None
    job = replace(job, device=strategy.device) if strategy.blocks else job
    if strategy.blocks and (scheme.needs_modelopt or not weighted):
        from bridge.calibration.walk.options import Options
        from bridge.calibration.walk.run import calibrate_by_blocks

        made = calibrate_by_blocks(job, Options(strategy.ahead, spill, strategy.need.room(strategy.budget)))
    elif scheme.needs_modelopt or not weighted:
        made = fake_quantize(job).calibration
    if made and not weighted:
        return made
    from bridge.calibration.importance.matrix import measure_importance  # a run of its own, of the plain model

    return measure_importance(job, added_to=made, by_blocks=strategy.blocks or grams, spill=spill)


def _calibrate_share(job: CalibrationJob, workers: Workers) -> Calibration:
    """Calibrate with this process's share of the batches; every process returns the same."""
    from bridge.calibration.walk.options import Options
    from bridge.calibration.walk.run import calibrate_by_blocks

    if why := _not_shared(job.scheme, job.data):
        raise CalibrationError(f"{why}; calibrate in one process (workers=1, or without torchrun)")
    check_same(workers, _arguments(job))
    here = workers.neighbours()
    own = replace(job.data, batches=tuple(batch for _, batch in workers.share(job.data.batches)))
    device = device_of(job.device or home_of(job.source), here.index(workers.rank))
    free = free_memory(device) // (1 if is_cuda(device) else len(here))
    # sums over the experts of a layer are not joined
    strategy = choose_strategy(replace(job, data=own, device=device, free=free), whole_layers=True)
    kept = job.partial and workers.own_directory(job.partial)
    progress = job.progress if workers.first else no_progress
    job = replace(job, device=device, partial=kept, progress=progress)
    made = calibrate_by_blocks(job, Options(strategy.ahead, strategy.spill(kept, len(here))))
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


def _arguments(job: CalibrationJob) -> dict[str, str]:
    """What has to be the same in all processes, by the word of the caller."""
    return {
        "model": fingerprint(job.structure, job.source),
        "quant": job.scheme.digest,
        "data": job.data.digest,
        "device": str(job.device).partition(":")[0],
        "partial": str(job.partial is not None),
        "compute": job.source.runs_in,
        "version of nvidia-modelopt, qbridge, torch or transformers": repr(versions_of(PACKAGES)),
    }


def _weighted(scheme: Scheme) -> bool:
    return any(form.watched for form in scheme.formats)


def specs_in_memory(source: Source) -> Mapping[str, TensorSpec]:
    """The tensors in the dtype that the model runs in, which `compute=` may choose."""
    dtype = source.runs_in
    return {name: replace(spec, dtype=dtype) for name, spec in source.specs.items()} if dtype else source.specs


def free_memory(device: str | None) -> int:
    """Return the free memory of the machine, or of the CUDA device that holds the model."""
    if not is_cuda(device):
        return available_memory()
    import torch

    return int(torch.cuda.mem_get_info(torch.device(str(device)))[0])
