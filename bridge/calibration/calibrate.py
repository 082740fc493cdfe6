"""Calibrate the model of a source: whole, or block by block where memory is too small for that."""

from __future__ import annotations

from collections.abc import Collection

from bridge.calibration.data import Data
from bridge.calibration.modelopt import check_data, check_device, fake_quantize
from bridge.calibration.walk.budget import Need, Tokens, by_blocks, need, tokens_of
from bridge.core.machine import available_memory
from bridge.core.progress import Progress, no_progress
from bridge.core.text import size
from bridge.core.values import Structure
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
) -> Calibration:
    """Run the model of `source` with ModelOpt and return its statistics; the model is not changed.

    `memory`: bytes that the run may take; None: most of what is free. Above it the model runs block by block, with the
    same result. `needed`: modules that will be quantized.

    Raises:
        CalibrationError: before the model is loaded if data or CUDA are missing.
        UsageError: `memory` does not hold the largest block.
    """
    check_device(scheme, device)
    check_data(scheme, data)
    report = progress or no_progress
    if not by_blocks(
        calibration_need(source, scheme, tokens_of(data)),
        memory,
        _free(device),
        driven=data.forward_loop is not None,
        resident=isinstance(source, MemorySource),
    ):
        return fake_quantize(source, structure, scheme, data, device=device, progress=report, needed=needed).calibration
    from bridge.calibration.walk.run import calibrate_by_blocks

    return calibrate_by_blocks(source, structure, scheme, data, device, report, needed)


def calibration_need(source: Source, scheme: Scheme, tokens: Tokens) -> Need:
    """Return the bytes that a calibration takes, whole and block by block; reads headers."""
    algorithms = {form.algorithm for form in scheme.formats}
    second = "awq" in algorithms and (scheme.kv is not None or "smoothquant" in algorithms)
    return need(source.specs, source.config, scheme, tokens, 2 if second else 1)


def choice_line(found: Need, memory: int | None) -> str:
    """Both figures, and which way a calibration goes on this machine."""
    budget, what = (memory, "given") if memory is not None else (available_memory(), "free here")
    try:
        way = "block by block" if by_blocks(found, memory, budget, False, False) else "the whole model at once"
    except Exception:
        way = "not at all"
    return f"{found.line()}; with {size(budget)} {what}: {way}"


def _free(device: str | None) -> int:
    """Return the free memory of the machine, or of the CUDA device that holds the model."""
    if not str(device or "").startswith("cuda"):
        return available_memory()
    import torch

    return int(torch.cuda.mem_get_info(torch.device(str(device)))[0])
