"""Find scales of weights that are wrong in themselves.

All scales are read, and the codes of blocks whose scale is zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bridge.quant.codec.arrays import Array
from bridge.quant.codec.decode import values
from bridge.sources.quantized.dequantize import cells_of, code_rows, scale_rows
from bridge.sources.quantized.parts import QuantizedWeight
from bridge.workflows.doctor.checkpoint import Checkpoint
from bridge.workflows.doctor.finding import Finding
from bridge.workflows.doctor.rescale import VALUES
from bridge.workflows.doctor.scales import above

LARGEST = 65504  # of float16; no weight comes near
ZERO, NEGATIVE = "is zero, and codes under it are not: those weights are lost", "is negative"
INVALID, HUGE = "holds NaN or infinity", f"gives weights above {LARGEST}"
MEND = "get the checkpoint again, or quantize the model again"


def weight_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales of weights that are wrong in themselves; of NVFP4 also those above the blocks."""
    found: dict[str, list[str]] = {}
    for weight in checkpoint.modules.values():
        for what, part in _faults(weight):
            found.setdefault(what, []).append(weight.parts[part].spec.name)
    for what, names in found.items():
        yield Finding("scales-invalid", what, tuple(names), MEND)


def _faults(weight: QuantizedWeight) -> Iterator[tuple[str, str]]:
    """What is wrong with which part; each once."""
    factor = 1.0
    if "scale_2" in weight.parts and weight.parts["scale_2"].spec.size == 1:
        factor = above(weight)
        if not np.isfinite(factor) or factor <= 0:
            yield INVALID if not np.isfinite(factor) else NEGATIVE if factor < 0 else ZERO, "scale_2"
            return
    stack = range(weight.spec.shape[0]) if len(weight.spec.shape) > 2 else ()
    experts = map(weight.expert, stack) if stack else [weight]
    yield from dict.fromkeys((what, "scale") for one in experts for what in _of_blocks(one, factor))


def _of_blocks(weight: QuantizedWeight, factor: float) -> Iterator[str]:
    """What is wrong with the scales of one matrix, some rows of it at a time."""
    cells, numeric = cells_of(weight), weight.format.weight[0]
    step = max(VALUES // cells.cols // cells.down, 1)
    most, zeros, lost = 0.0, 0, False
    for begin in range(0, cells.shape[0], step):
        end = min(begin + step, cells.shape[0])
        bits = scale_rows(weight, begin, end)
        scales = bits if weight.scale_is_float else values(bits, numeric.scale_dtype)
        if not (finite := np.isfinite(scales)).all():
            yield INVALID
        if not weight.coding.signed and (scales < 0).any():
            yield NEGATIVE
        most = max(most, float(np.abs(scales[finite]).max(initial=0)))
        if (none := scales == 0).any():
            zeros += int(none.sum())
            lost = lost or bool((none & _has_codes(weight, begin, end)).any())
    # a block far below the largest has a scale below the least of E4M3: no weight is lost that would count
    if lost and (not numeric.two_level or zeros == cells.shape[0] * cells.shape[1]):
        yield ZERO
    if most * factor * numeric.maxbound > LARGEST:
        yield HUGE


def _has_codes(weight: QuantizedWeight, begin: int, end: int) -> Array:
    """Which blocks of some rows of the grid have codes other than zero."""
    cells, dtype = cells_of(weight), weight.format.weight[0].dtype
    codes = np.ascontiguousarray(code_rows(weight, begin * cells.down, min(end * cells.down, cells.rows)))
    full = values(codes, dtype) != 0
    across = np.logical_or.reduceat(full, range(0, full.shape[1], cells.across), axis=1)
    return np.logical_or.reduceat(across, range(0, len(full), cells.down), axis=0)
