"""The size of INT4 blocks that divides every matrix.

ModelOpt's and vLLM's configuration names one size for the whole checkpoint, and no runtime pads a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bridge.core.values import Format, Numeric, Site, Structure, TensorSpec
from bridge.quant.schemes.scheme import Scheme

SIZES = (128, 64, 32)
NOTE = "INT4 blocks of {size} instead of {first}: {module} has in = {width}, and a checkpoint has one size"


def with_dividing_blocks(scheme: Scheme, structure: Structure, specs: Mapping[str, TensorSpec]) -> Scheme:
    """The scheme with the largest size that divides all of the model; unchanged if none does, or none has to."""
    if scheme.rules or not any(_has_blocks(numeric) for numeric in scheme.weight):
        return scheme
    widths = {
        site.module: width
        for site in structure.sites
        if isinstance(scheme.format_of(site), Format) and (width := _width(site, specs.get(site.weight)))
    }
    size = next((size for size in SIZES if all(width % size == 0 for width in widths.values())), SIZES[0])
    if size == SIZES[0]:
        return scheme
    module = next(module for module, width in widths.items() if width % SIZES[0])
    weight = tuple(replace(one, block=(size,)) if _has_blocks(one) else one for one in scheme.weight)
    note = NOTE.format(size=size, first=SIZES[0], module=module, width=widths[module])
    return replace(scheme, weight=weight, note=note)


def _has_blocks(numeric: Numeric) -> bool:
    return (numeric.dtype, numeric.block) == ("int4", (SIZES[0],))


def _width(site: Site, spec: TensorSpec | None) -> int:
    """The extent `in` of a matrix; 0 for a convolution, which no target writes in blocks."""
    if spec is None or site.layout == "conv":
        return 0
    return spec.shape[-2] if site.layout in ("in_out", "stack_in_out") else spec.shape[-1]
