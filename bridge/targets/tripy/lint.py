"""Check a written directory against what nvtripy 0.1 loads and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from bridge.core.dtypes import DTYPES, FLOATS, to_float32
from bridge.core.errors import SourceError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.text import fold_problems
from bridge.core.values import Numeric, TensorSpec
from bridge.planning.plan import DEFAULT_FILE
from bridge.targets.tripy.formats import CODES
from bridge.targets.tripy.section import Entry, Section, read_section

CHUNK = 1 << 21  # values that are quantized at once
Problems = Iterator[tuple[str, str]]  # a module or a tensor, and what is wrong with it
COMPANIONS = ("weight_scale", "input_scale", "pre_quant_scale")


def lint(directory: Path) -> list[str]:
    """Return a message for each violation of the contract, with modules folded. Reads scales, but no weight."""
    return _checked(directory, contract)


def audit(directory: Path) -> list[str]:
    """Find weights that are not a code times their scale.

    Of float8 under twice its scale only the odd smallest codes show it.
    """
    return _checked(directory, inexact)


def _checked(directory: Path, check: Callable[[SafetensorsFile, Section], Problems]) -> list[str]:
    try:
        section, _ = read_section(directory)
        file = SafetensorsFile(directory / DEFAULT_FILE)
        return [f"error [tripy] {line}" for line in fold_problems(check(file, section))]
    except SourceError as error:
        return [f"error [files] {error}"]


def contract(file: SafetensorsFile, section: Section) -> Problems:
    """Compare the file with config.json."""
    for name, spec in file.specs.items():
        if DTYPES[spec.dtype].floating and spec.dtype != section.dtype:
            yield name, f"is {spec.dtype}, but a module of {section.dtype} takes only {section.dtype}"
        module, _, part = name.rpartition(".")
        if part in COMPANIONS and not _has_companion(section.modules.get(module), part):
            yield name, "does not belong to a quantized module of config.json"
    for module, entry in section.modules.items():
        for text in _module(file, module, entry):
            yield module, text


def _has_companion(entry: Entry | None, part: str) -> bool:
    return entry is not None and (part == "weight_scale" or bool(getattr(entry, part)))


def _module(file: SafetensorsFile, module: str, entry: Entry) -> Iterator[str]:
    specs: Mapping[str, TensorSpec] = file.specs
    weight, scale = specs.get(f"{module}.weight"), specs.get(f"{module}.weight_scale")
    if weight is None or scale is None or len(weight.shape) != 2:
        yield "has no weight matrix with a weight_scale"
        return
    first, second = weight.shape
    expected: tuple[int, ...] = (first,) if entry.weight_quant_dim == 0 else ()
    if entry.block:
        if first % entry.block:
            yield f"has blocks of {entry.block}, which do not divide the first axis of {weight.shape}"
        expected = (first // entry.block, second)
    if scale.shape != expected:
        yield f"has a weight_scale of shape {scale.shape}; Tripy reads {expected}"
    in_ = first if entry.layout == "in_out" else second
    for part, shape in (("input_scale", ()), ("pre_quant_scale", (in_,))):
        companion = specs.get(f"{module}.{part}")
        if _has_companion(entry, part) and (companion is None or companion.shape != shape):
            yield f"lacks {part} of shape {shape}"
    for part in COMPANIONS:
        spec = specs.get(f"{module}.{part}")
        if spec is None or spec.dtype not in FLOATS:
            continue
        values = to_float32(file.read(spec.name), spec.dtype)
        if not (np.isfinite(values) & (values > 0)).all():
            yield f"has {part} that is not finite and positive"


def inexact(file: SafetensorsFile, section: Section) -> Problems:
    """Compare weights with their codes, in a file that keeps the contract."""
    if section.snapped and not any(contract(file, section)):
        for module, entry in section.modules.items():
            if text := _inexact(file, module, entry):
                yield module, text


def _inexact(file: SafetensorsFile, module: str, entry: Entry) -> str:
    from bridge.quant.codec.fake_quant import fake_quantized, runtime_codes

    spec, down = file.specs[f"{module}.weight"], entry.block or 1
    scale = to_float32(file.read(f"{module}.weight_scale"), spec.dtype)
    (rows, cols), wrong = spec.shape, 0
    numeric = Numeric(next(ours for ours, theirs in CODES.items() if theirs == entry.quant_dtype), "block")
    grid = scale if entry.block else np.broadcast_to(scale.reshape(-1, 1), (rows, 1))
    step = max(CHUNK // cols // down, 1) * down
    for first in range(0, rows, step):
        stored = file.read_rows(spec.name, first, min(first + step, rows))
        part = np.ascontiguousarray(grid[first // down : (first + step) // down])
        across = 1 if entry.block else cols
        codes = runtime_codes(stored, spec.dtype, numeric, part, down, across)
        again = fake_quantized(codes, numeric, part, down, across, spec.dtype)
        wrong += int((to_float32(again, spec.dtype) != to_float32(stored, spec.dtype)).sum())
    if not wrong:
        return ""
    return (
        f"has {wrong} of {rows * cols} weights that are not a code times its weight_scale, although config.json says "
        "snapped: one of the two was changed; convert again"
    )
