"""Calibrate a model: whole, or block by block where memory is small."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.calibration.compute import model_in_memory
from bridge.calibration.data import Data
from bridge.calibration.modelopt import PACKAGES, fake_quantize, fingerprint
from bridge.calibration.quantizers import calibrator
from bridge.calibration.requirements import check_data, check_device
from bridge.calibration.walk.budget import Need, by_blocks, calibration_need, memory_of, stacked_bytes, tokens_of
from bridge.calibration.walk.workers.device import device_of, home_of
from bridge.calibration.walk.workers.processes import Workers, check_same
from bridge.core.errors import CalibrationError, UsageError
from bridge.core.machine import available_memory
from bridge.core.progress import Progress, no_progress
from bridge.core.text import size
from bridge.core.values import Structure, TensorSpec, main_dtype
from bridge.core.version import installed
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme, is_calibrated
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.calibration.walk.states import Spill
JOINED = {"max", "mse", "smoothquant", "awq"}  # algorithms whose statistics `walk.workers.join` puts together


@dataclass(frozen=True)
class Way:
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
        return not self.resident and self.need.blocks + self.need.largest_bytes <= self.budget

    def told(self) -> str:
        """Say that free memory sends the model through in blocks, with both figures; "" if the caller chose."""
        if self.memory is not None or not self.blocks:
            return ""
        spilled = self.need.states - self.need.share(self.budget)
        files = f", with {size(spilled)} of activations in files" if spilled else ""
        return (
            f"the calibration runs block by block, because the whole model takes {size(self.need.whole)} of memory and "
            f"{size(self.budget)} of what is free here may be used (memory=, --memory); blocks take "
            f"{size(min(self.need.blocks, self.budget))}{files}"
        )

    def spill(self, partial: Path | None, sharing: int = 1) -> Spill | None:
        """Where a run by blocks keeps activations that memory does not hold; None if it holds all.

        UsageError if the disk has no room for all that the run writes; `sharing`: processes that write there.
        """
        from bridge.calibration.walk.states import spill_to

        if self.need.parked and self.need.parked > (free := available_memory() // sharing):
            raise UsageError(
                f"{size(self.need.parked)} of activations wait in the host's memory, of which {size(free)} is free; "
                "give fewer samples= (--samples)"
            )
        share = self.need.share(self.budget)
        kept = 0 if partial is None else self.need.states  # finished blocks keep their outputs twice in turn
        spare = max(0, self.budget - self.need.blocks)
        return spill_to(partial, share, self.need.states - share, self.need.codes, kept, spare, sharing)


def way_of(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    data: Data,
    memory: int | None,
    device: str | None,
    free: int | None = None,
    whole_layers: bool = False,
) -> Way:
    """Decide how to calibrate; reads headers, and refuses what no way fits.

    `free`: what was read before; None reads it. `whole_layers`: the experts of a layer do not run one by one.
    """
    device, resident = device or home_of(source), model_in_memory(source) is not None
    free = free_memory(device) if free is None else free
    specs = _in_memory(source)
    found = calibration_need(specs, source.config, scheme, tokens_of(data), structure.sites)
    if resident:
        found = replace(found, whole=found.whole - stacked_bytes(specs.values()))  # nothing is loaded
    if data.cut or whole_layers:
        found = found.uncut  # the choice of samples looks into whole layers
    found = found.on_device if str(device or "").startswith("cuda") else replace(found, parked=0)
    # the float32 copy of a model in memory is not there yet
    there = resident and source.runs_in in ("", main_dtype(source.specs.values()))
    cut = by_blocks(found, memory, free, driven=data.forward_loop is not None, resident=there)
    return Way(found, memory, free, cut, device, resident)


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
    free: int | None = None,
) -> Calibration:
    """Run the model of `source`, with ModelOpt where the scheme needs it, and return its statistics.

    The model is not changed. `memory`: bytes that the run may take; None: most of what is free. Above it the model runs
    block by block, with the same result. `needed`: modules that will be quantized. `partial`: a directory that keeps
    finished blocks meanwhile, so that a killed run goes on. `workers`: processes that share the batches; the model runs
    block by block then, since they meet at each. `free`: free memory as it was read before.

    Raises:
        CalibrationError: before the model is loaded if data or CUDA are missing.
        UsageError: `memory` does not hold the largest block, or the disk has no room.
    """
    check_device(scheme, device)
    check_data(scheme, data)
    scheme, report = scheme.bound(structure.sites), progress or no_progress
    if workers:
        return _together(source, structure, scheme, data, device, report, needed, memory, partial, workers)
    way, weighted, made = way_of(source, structure, scheme, data, memory, device, free), _weighted(scheme), None
    spill = way.spill(partial) if way.blocks else None
    if way.blocks and (scheme.needs_modelopt or not weighted):
        from bridge.calibration.walk.gauge import Options
        from bridge.calibration.walk.run import calibrate_by_blocks

        options = Options(way.ahead, spill, way.need.room(way.budget))
        made = calibrate_by_blocks(source, structure, scheme, data, way.device, report, needed, partial, options)
    elif scheme.needs_modelopt or not weighted:
        made = fake_quantize(source, structure, scheme, data, device=device, progress=report, needed=needed).calibration
    if made and not weighted:
        return made
    from bridge.calibration.importance.matrix import measure_importance  # a run of its own, of the plain model

    return measure_importance(
        source, structure, scheme, data, device=way.device if way.blocks else device, progress=report, needed=needed,
        beside=made, by_blocks=way.blocks, spill=spill,
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
    from bridge.calibration.walk.gauge import Options
    from bridge.calibration.walk.run import calibrate_by_blocks

    if why := _not_shared(scheme, data):
        raise CalibrationError(f"{why}; calibrate in one process (workers=1, or without torchrun)")
    check_same(workers, _arguments(source, structure, scheme, data, device, partial))
    here = workers.neighbours()
    own = replace(data, batches=tuple(batch for _, batch in workers.share(data.batches)))
    device = device_of(device or home_of(source), here.index(workers.rank))
    free = free_memory(device) // (1 if str(device or "").startswith("cuda") else len(here))
    # sums over the experts of a layer are not joined
    way = way_of(source, structure, scheme, own, memory, device, free, whole_layers=True)
    kept = partial and workers.own_directory(partial)
    progress = report if workers.first else no_progress
    options = Options(way.ahead, way.spill(kept, len(here)), workers=workers)
    made = calibrate_by_blocks(source, structure, scheme, data, device, progress, needed, kept, options)
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
        "compute": source.runs_in,
        "version of nvidia-modelopt, qbridge, torch or transformers": repr([installed(name) for name in PACKAGES]),
    }


def _weighted(scheme: Scheme) -> bool:
    return any(form.weighted for form in scheme.formats)


def _in_memory(source: Source) -> Mapping[str, TensorSpec]:
    """The tensors in the dtype that the model runs in, which `compute=` may choose."""
    dtype = source.runs_in
    return {name: replace(spec, dtype=dtype) for name, spec in source.specs.items()} if dtype else source.specs


def free_memory(device: str | None) -> int:
    """Return the free memory of the machine, or of the CUDA device that holds the model."""
    if not str(device or "").startswith("cuda"):
        return available_memory()
    import torch

    return int(torch.cuda.mem_get_info(torch.device(str(device)))[0])
