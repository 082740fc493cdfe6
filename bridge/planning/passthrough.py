"""What a quantized source has already, as a scheme: each module keeps its format; whether a step can carry it over.

Plan time: scalars of the source are read here (two scales that a target holds as one must be equal), weights never.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridge.budget import coded_whole
from bridge.errors import fold_layers
from bridge.quant.blocks import grid, packing
from bridge.quant.grammar import Gate, Parity
from bridge.quant.scheme import Rule, Scheme, has_tensor_scale
from bridge.values import Format, LazyTensor, Site, Slice, Structure

if TYPE_CHECKING:
    from bridge.planning import Output, Step
    from bridge.sources.quantized import Quantized
    from bridge.sources.stored import Stored

NAME = "stored"
# Codes are carried as they are; what they are compared with was rounded to the model's dtype, to bfloat16 by 2^-9 at
# most, and all one way where a weight has few values; twice where there is a pre-scale.
SAME = Gate(0.9999, (0.995, 1.005))
# of outputs: a target may quantize activations, which the source's weights alone do not; the widest of our schemes
ANY = Gate(0.88, (0.85, 1.15))
OTHERWISE = "quant='none' writes the weights dequantized (--quant none), quant='<scheme>' quantizes them anew"


@dataclass(frozen=True)
class StoredScheme(Scheme):
    """The formats of a quantized source by module; nothing of it is calibrated or coded anew."""

    modules: Mapping[str, Format] = field(default_factory=dict)

    @property
    def needs_calibration(self) -> bool:
        return False

    @property
    def digest(self) -> str:
        said = {module: dataclasses.asdict(form) for module, form in self.modules.items()}
        kv = dataclasses.asdict(self.kv) if self.kv else None
        return hashlib.sha256(json.dumps([NAME, said, kv], sort_keys=True).encode()).hexdigest()

    def rule_of(self, site: Site) -> Rule | None:
        return None

    def format_of(self, site: Site) -> Format | str:
        return self.modules.get(site.module) or "not quantized in the source"

    def gate_of(self, site: Site) -> Gate:
        return self.parity.tensor


def stored_scheme(quantized: Quantized) -> StoredScheme | None:
    """The scheme that carries a source over; None where only its KV cache is quantized."""
    formats = {module: stored.format for module, stored in quantized.taken.stored.items()}
    if not formats:
        return None
    first = next(iter(formats.values()))
    kv = quantized.kv if quantized.taken.attention else None
    summary = "as the source is quantized already"
    return StoredScheme(NAME, summary, first.weight, first.input, Parity(SAME, ANY), kv=kv, modules=formats)


def apart(structure: Structure, scheme: Scheme | None) -> Structure:
    """Modules share nothing where a quantized source is carried over: its scales are what they are."""
    if not isinstance(scheme, StoredScheme):
        return structure
    sites = tuple(dataclasses.replace(site, shares="") for site in structure.sites)
    return dataclasses.replace(structure, sites=sites, groups=(), ungrouped="")


def carry(
    steps: list[Step], quantized: Quantized | None, scheme: Scheme | None
) -> tuple[list[Step], list[tuple[str, str]]]:
    """The steps as they carry a quantized source over, and what stands in the way."""
    if quantized is None or not isinstance(scheme, StoredScheme):
        return steps, []
    made = [_carried(step, quantized) for step in steps]
    return [step for step, _ in made], [problem for _, problems in made for problem in problems]


def told(quantized: Quantized | None, scheme: Scheme | None, steps: list[Step]) -> tuple[str, ...]:
    """What becomes of codes that the source holds, for the plan's notes."""
    if quantized is None:
        return ()
    modules = quantized.taken.stored
    if not isinstance(scheme, StoredScheme):
        return (f"{len(modules)} weights of the source are quantized: they are dequantized first",)
    kept = {step.site.module for step in steps if step.site and step.format}
    lost = fold_layers(module for module in modules if module not in kept)
    return (f"written dequantized, for they are no quantizable matrices here: {', '.join(lost)}",) if lost else ()


def _carried(step: Step, quantized: Quantized) -> tuple[Step, list[tuple[str, str]]]:
    """One step; its float scales get a dtype that holds those of the source."""
    if step.attention:
        scales = quantized.taken.attention.get(step.attention, {})
        told = tuple(_said(output, [scales[output.part]] if output.part in scales else []) for output in step.outputs)
        problem = [] if scales else [(step.attention, "the source has no scales of keys and values")]
        return dataclasses.replace(step, outputs=told), problem
    site = step.site
    if step.format is None or site is None:
        return step, []
    members = [quantized.taken.stored.get(part.module or site.module) for part in step.inputs]
    whole = [stored for stored in members if stored is not None]
    if len(whole) < len(members) or any(stored.format.weight != step.format.weight for stored in whole):
        return step, [(site.module, f"joins matrices that the source quantizes in different ways; {OTHERWISE}")]
    problems = [*_cut(step, whole), *_scales(step, whole), *_companions(step, whole)]
    coding = step.coding
    if coding.values:
        kept = tuple(_said(output, _parts(output, whole)) for output in step.outputs)
    else:
        kept = tuple(_kept(output, whole) for output in step.outputs)
    scale = next((output.spec.dtype for output in kept if output.part == "scale"), "")
    if not coding.values and step.format.weight[0].scale_dtype == "float32":
        coding = dataclasses.replace(coding, scale_dtype=scale)
    step = dataclasses.replace(step, outputs=kept, coding=coding)
    return step, [(site.module, f"{problem}; {OTHERWISE}") for problem in problems]


def _cut(step: Step, members: Sequence[Stored]) -> list[str]:
    """Slices must not cut through blocks, nor through pairs of rows that share a byte."""
    assert step.format and step.site
    first, problems = step.format.weight[0], []
    turned = step.site.layout != "out_in"
    if any(not part.source for part in step.inputs):
        problems.append("the target pads it with zeros, for which codes would have to be made")
    if any(stored.turned != turned for stored in members) or any(part.transposed for part in step.inputs) > turned:
        problems.append("the source stores it [out, in], the architecture [in, out]")
    pairs = 2 if packing(first, "out_in", coded_whole(step), step.coding) == "out" else 1
    for part, stored in zip(step.inputs, members, strict=True):
        cells = grid(first, stored.spec.shape, "out_in")
        (begin, end), (left, right) = spans(part, stored)
        down = 1 if cells.down >= cells.rows else cells.down
        across = 1 if cells.across >= cells.cols else cells.across
        ragged = begin % down or (end % down and end != cells.rows) or left % across
        if ragged or (right % across and right != cells.cols):
            problems.append(f"cuts {part.source} inside its blocks of {first.block}")
        if begin % pairs or end % pairs:
            problems.append(f"cuts {part.source} between two rows that share bytes")
        if down > 1 and len(members) > 1 and end % down:
            problems.append(f"joins {part.source} to others inside a block of {first.block}")
    return problems


def spans(part: Slice, stored: Stored) -> tuple[tuple[int, int], tuple[int, int]]:
    """The part of `out` and the part of `in` that a slice takes of a stored weight."""
    out, in_ = (part.cols, part.rows) if stored.turned else (part.rows, part.cols)
    return out or (0, stored.spec.shape[0]), in_ or (0, stored.spec.shape[1])


def _scales(step: Step, members: Sequence[Stored]) -> list[str]:
    """A scale of the whole matrix must be one and the same number in all that are joined to one."""
    assert step.format
    if len(members) == 1 or not has_tensor_scale(step.format):
        return []
    part = "scale" if step.format.weight[0].per == "tensor" else "scale_2"
    found = {stored.parts[part].read().tobytes() for stored in members}
    names = ", ".join(stored.module for stored in members)
    return [f"joins {names}, whose weights have scales of their own, under one scale"] if len(found) > 1 else []


def _companions(step: Step, members: Sequence[Stored]) -> list[str]:
    """What lies beside the codes in the source must have a place, and what the target wants must be there."""
    wanted = {output.part for output in step.outputs}
    problems = []
    for part, word in (("input_scale", "scale of its input"), ("pre_quant_scale", "pre-scale")):
        lacking = [stored.module for stored in members if part not in stored.parts]
        if part in wanted and lacking:
            problems.append(f"the source has no {word} of {', '.join(lacking)}")
        if part not in wanted and len(lacking) < len(members):
            problems.append(f"the target has no place for its {word}")
    if "pre_quant_scale" in wanted and len(members) > 1:
        problems.append("joins matrices that have a pre-scale each")
    return problems


def _kept(output: Output, members: Sequence[Stored]) -> Output:
    """The output as it is carried; scales in a dtype that holds those of the source, where the target's does not."""
    found, part = _parts(output, members), output.part
    output = _said(output, found)
    floats = part == "input_scale" or (part == "scale" and members[0].scale_is_float)
    if not floats or not found or output.spec.dtype in ("float32", found[0].spec.dtype):
        return output
    return dataclasses.replace(output, spec=dataclasses.replace(output.spec, dtype=found[0].spec.dtype))


def _parts(output: Output, members: Sequence[Stored]) -> list[LazyTensor]:
    """The source's tensors of which an output is made."""
    part = "codes" if output.part == "weight" else output.part
    return [stored.parts[part] for stored in members if part in stored.parts]


def _said(output: Output, parts: Sequence[LazyTensor]) -> Output:
    names = ", ".join(part.spec.name for part in parts)
    return dataclasses.replace(output, expression=f"as stored: {names}") if parts else output
