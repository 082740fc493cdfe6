"""Calibrate a model: whole, or block by block where memory is small."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from bridge.calibration.data import Data
from bridge.calibration.modelopt import check_data, check_device, fake_quantize
from bridge.calibration.walk.budget import USED, by_blocks, calibration_need, tokens_of
from bridge.core.machine import available_memory
from bridge.core.progress import Progress, no_progress
from bridge.core.values import Structure, TensorSpec
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.memory import MemorySource
from bridge.sources.source import Source


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
) -> Calibration:
    """Run the model of `source`, with ModelOpt where the scheme needs it, and return its statistics.

    The model is not changed. `memory`: bytes that the run may take; None: most of what is free. Above it the model runs
    block by block, with the same result. `needed`: modules that will be quantized. `partial`: a directory that keeps
    finished blocks meanwhile, so that a killed run goes on.

    Raises:
        CalibrationError: before the model is loaded if data or CUDA are missing.
        UsageError: `memory` does not hold the largest block.
    """
    check_device(scheme, device)
    check_data(scheme, data)
    report = progress or no_progress
    found = calibration_need(_in_memory(source), source.config, scheme, tokens_of(data))
    cut, weighted, made = runs_by_blocks(source, scheme, data, memory, device), _weighted(scheme), None
    if cut and (scheme.needs_modelopt or not weighted):
        from bridge.calibration.walk.run import calibrate_by_blocks

        budget = memory if memory is not None else int(available_memory() * USED)
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
