"""Hold a written directory to what nvtripy 0.1 loads and traces, from its files alone; never trusts the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from bridge.container import SafetensorsFile
from bridge.dtypes import DTYPES, FLOATS, to_float32
from bridge.errors import SourceError, fold_problems
from bridge.planning import DEFAULT_FILE
from bridge.tripy.formats import CODES
from bridge.tripy.section import Entry, Section, read_section
from bridge.values import Numeric, TensorSpec

PIECE = 1 << 21  # values that are coded at once
COMPANIONS = ("weight_scale", "input_scale", "pre_quant_scale")


def lint(directory: Path) -> list[str]:
    """What breaks the contract, one message a finding, modules folded; [] if nothing does. Reads scales, no weight."""
    try:
        section, _ = read_section(directory)
        file = SafetensorsFile(directory / DEFAULT_FILE)
        return [f"error [tripy] {line}" for line in fold_problems(contract(file, section))]
    except SourceError as error:
        return [f"error [files] {error}"]


def audit(directory: Path) -> list[str]:
    """Weights that are no code times their scale; of float8 under twice its scale only the odd least codes tell."""
    try:
        section, _ = read_section(directory)
        file = SafetensorsFile(directory / DEFAULT_FILE)
        if not section.snapped or any(contract(file, section)):
            return []
        wrong = [(name, text) for name, entry in section.modules.items() if (text := _unsnapped(file, name, entry))]
        return [f"error [tripy] {line}" for line in fold_problems(wrong)]
    except SourceError as error:
        return [f"error [files] {error}"]


def contract(file: SafetensorsFile, section: Section) -> Iterator[tuple[str, str]]:
    """Yield (module or tensor, what is wrong): the file beside what config.json says of it."""
    for name, spec in file.specs.items():
        if DTYPES[spec.dtype].floating and spec.dtype != section.dtype:
            yield name, f"is {spec.dtype}, a module of {section.dtype} takes no other"
        module, _, part = name.rpartition(".")
        if part in COMPANIONS and not _beside(section.modules.get(module), part):
            yield name, "belongs to no quantized module of config.json"
    for module, entry in section.modules.items():
        for text in _module(file, module, entry):
            yield module, text


def _beside(entry: Entry | None, part: str) -> bool:
    """True where an entry says that a companion is there."""
    return entry is not None and (part == "weight_scale" or bool(getattr(entry, part)))


def _module(file: SafetensorsFile, module: str, entry: Entry) -> Iterator[str]:
    """What is wrong with one quantized module."""
    specs: Mapping[str, TensorSpec] = file.specs
    weight, scale = specs.get(f"{module}.weight"), specs.get(f"{module}.weight_scale")
    if weight is None or scale is None or len(weight.shape) != 2:
        yield "has no weight matrix with a weight_scale beside it"
        return
    first, second = weight.shape
    expected: tuple[int, ...] = (first,) if entry.weight_quant_dim == 0 else ()
    if entry.block:
        if first % entry.block:
            yield f"has blocks of {entry.block}, which do not divide the first axis of {weight.shape}"
        expected = (first // entry.block, second)
    if scale.shape != expected:
        yield f"has a weight_scale of shape {scale.shape}, where {expected} is read"
    in_ = first if entry.layout == "in_out" else second
    for part, shape in (("input_scale", ()), ("pre_quant_scale", (in_,))):
        found = specs.get(f"{module}.{part}")
        if _beside(entry, part) and (found is None or found.shape != shape):
            yield f"lacks {part} of shape {shape}"
    for part in COMPANIONS:
        spec = specs.get(f"{module}.{part}")
        if spec is None or spec.dtype not in FLOATS:
            continue
        values = to_float32(file.read(spec.name), spec.dtype)
        if not (np.isfinite(values) & (values > 0)).all():
            yield f"has {part} that is not finite and above zero"


def _unsnapped(file: SafetensorsFile, module: str, entry: Entry) -> str:
    from bridge.quant.snapped import coded, snapped  # loads numba

    spec, down = file.specs[f"{module}.weight"], entry.block or 1
    scale = to_float32(file.read(f"{module}.weight_scale"), spec.dtype)
    (rows, cols), wrong = spec.shape, 0
    numeric = Numeric(next(ours for ours, theirs in CODES.items() if theirs == entry.quant_dtype), "block")
    grid = scale if entry.block else np.broadcast_to(scale.reshape(-1, 1), (rows, 1))
    step = max(PIECE // cols // down, 1) * down
    for first in range(0, rows, step):
        stored = file.read_rows(spec.name, first, min(first + step, rows))
        part = np.ascontiguousarray(grid[first // down : (first + step) // down])
        across = 1 if entry.block else cols
        codes = coded(stored, spec.dtype, numeric, part, down, across)
        again = snapped(codes, numeric, part, down, across, spec.dtype)
        wrong += int((to_float32(again, spec.dtype) != to_float32(stored, spec.dtype)).sum())
    if not wrong:
        return ""
    return (
        f"has {wrong} of {rows * cols} weights that are no code times its weight_scale, though config.json says "
        "snapped: one of the two was changed; convert again"
    )
