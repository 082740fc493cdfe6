"""Plan to copy the codes and scales of a quantized source.

Only scalars of the source are read here: two scales that a target stores as one must be equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.core.dtypes import BLOCKS
from bridge.core.records import changed, recorded
from bridge.core.text import fold_layers
from bridge.core.values import Format, LazyTensor, Site, Slice, Structure
from bridge.planning.plan import PASSTHROUGH, Layout, Output, Step
from bridge.quant.codec.blocks import grid, packing
from bridge.quant.schemes.grammar import Gate, Gates
from bridge.quant.schemes.scheme import Rule, Scheme, has_tensor_scale

if TYPE_CHECKING:
    from bridge.sources.quantized.checkpoint import Quantized
    from bridge.sources.quantized.parts import QuantizedWeight

# Codes are copied unchanged. The weights that they are compared with were rounded to the model's dtype: by 2^-9 at most
# in bfloat16, all in one direction if a weight has few values, and twice if there is a pre_quant_scale.
TENSOR_GATE = Gate(0.9999, (0.995, 1.005))
# A target may quantize activations, which the source's weights alone do not: the widest output gate of our schemes.
OUTPUT_GATE = Gate(0.88, (0.85, 1.15))
REMEDY = "use quant='none' (--quant none) to dequantize, or a scheme name to re-quantize"


@dataclass(frozen=True)
class PassthroughScheme(Scheme):
    """The formats of a quantized source by module. Nothing is calibrated or re-quantized."""

    modules: Mapping[str, Format] = field(default_factory=dict)

    @property
    def needs_calibration(self) -> bool:
        return False

    @property
    def digest(self) -> str:
        parts = [PASSTHROUGH, self.modules, self.kv]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=recorded).encode()).hexdigest()

    def rule_of(self, site: Site) -> Rule | None:
        return None

    def format_of(self, site: Site) -> Format | str:
        return self.modules.get(site.module) or "not quantized in the source"

    def gate_of(self, site: Site) -> Gate:
        return self.parity.tensor


def passthrough_scheme(quantized: Quantized) -> PassthroughScheme | None:
    """The scheme that copies a quantized source; None if only its KV cache is quantized."""
    formats = {module: stored.format for module, stored in quantized.tensors.stored.items()}
    if not formats:
        return None
    first = next(iter(formats.values()))
    kv = quantized.kv if quantized.tensors.attention else None
    summary = "as the source is quantized already"
    parity = Gates(TENSOR_GATE, OUTPUT_GATE)
    return PassthroughScheme(PASSTHROUGH, summary, first.weight, first.input, parity, kv=kv, modules=formats)


def ungrouped(structure: Structure, scheme: Scheme | None) -> Structure:
    """The structure without groups that share scales, if the source's own scales are copied."""
    if not isinstance(scheme, PassthroughScheme):
        return structure
    sites = tuple(changed(site, shares="") if site.shares else site for site in structure.sites)
    return dataclasses.replace(structure, sites=sites, groups=(), ungrouped="", singles=(), feeds=())


def copied(
    steps: list[Step], quantized: Quantized | None, scheme: Scheme | None
) -> tuple[list[Step], list[tuple[str, str]]]:
    """The steps as they copy a quantized source, and the problems that prevent it: module, reason."""
    if quantized is None or not isinstance(scheme, PassthroughScheme):
        return steps, []
    results = [_copied_step(step, quantized) for step in steps]
    return [step for step, _ in results], [problem for _, problems in results for problem in problems]


def entry_problems(
    quantized: Quantized | None, scheme: Scheme | None, target: str, methods: Collection[str]
) -> list[tuple[str, str]]:
    """Entries of a quantization_config that are not followed: where weights are decoded, or codes copied elsewhere.

    methods: each `quant_method` that the target writes a config of.
    """
    if quantized is None:
        return []
    if not isinstance(scheme, PassthroughScheme):
        return [("config.json", why) for why in quantized.unread]
    names = ", ".join(quantized.entries)
    if quantized.matrices:
        rotated = f"{len(quantized.matrices)} matrices of {names} are not copied"
        return [("config.json", f"quantization_config: {rotated}; {REMEDY}")]
    if not names or quantized.method in methods:
        return []
    remedy = f"take the output's format (--format) of {quantized.method}, or {REMEDY}" if methods else REMEDY
    return [("config.json", f"quantization_config: target {target} cannot say {names} of {quantized.method}; {remedy}")]


def carried_entries(quantized: Quantized | None, scheme: Scheme | None, methods: Collection[str]) -> dict[str, Any]:
    """Entries of the source's quantization_config that are written beside copied codes; `methods`: the output's."""
    if quantized is None or not isinstance(scheme, PassthroughScheme):
        return {}
    return {**quantized.entries, **(quantized.of_inputs if quantized.method in methods else {})}


def passthrough_notes(
    quantized: Quantized | None, scheme: Scheme | None, steps: list[Step], methods: Collection[str]
) -> tuple[str, ...]:
    """Notes of the plan on weights that the source holds quantized."""
    if quantized is None:
        return ()
    modules = quantized.tensors.stored
    entries = ", ".join(quantized.entries)
    if not isinstance(scheme, PassthroughScheme):
        undone = (f"rotations of activations are undone in the weights ({entries})",) if entries else ()
        return (f"{len(modules)} weights of the source are quantized: they are dequantized first", *undone)
    notes = []
    if entries := ", ".join(carried_entries(quantized, scheme, methods)):
        notes.append(f"carried as it is, for the program that reads the codes: {entries} of quantization_config")
    if quantized.of_inputs and quantized.method not in methods:
        left = ", ".join(f"{name} {value}" for name, value in quantized.of_inputs.items())
        notes.append(
            f"{left} of quantization_config is left out: the program rounds scales of inputs in its own way; a config "
            f"of {quantized.method} says it"
        )
    kept = {module for step in steps if step.format for module in step.modules}
    read = {part.source for step in steps for part in step.inputs}
    lost = fold_layers(m for m, stored in modules.items() if m not in kept and stored.spec.name in read)
    text = f"written dequantized, since they are not quantizable matrices here: {', '.join(lost)}"
    return (*notes, *((text,) if lost else ()))


def _copied_step(step: Step, quantized: Quantized) -> tuple[Step, list[tuple[str, str]]]:
    """One step and its problems; its float scales get a dtype that holds those of the source."""
    if step.layout is Layout.SCALES:
        scales = quantized.tensors.attention.get(step.attention, {})
        outputs = tuple(
            _named(output, [scales[output.part]] if output.part in scales else []) for output in step.outputs
        )
        problem = [] if scales else [(step.attention, "the source has no scales of keys and values")]
        return dataclasses.replace(step, outputs=outputs), problem
    if step.layout is Layout.PLAIN:
        return step, []
    site, format_ = step.site, step.format
    assert site and format_
    weights = [quantized.tensors.stored.get(part.module or site.module) for part in step.inputs]
    members = [stored for stored in weights if stored is not None]
    if len(members) < len(weights) or any(stored.format.weight != format_.weight for stored in members):
        return step, [(site.module, f"joins matrices that the source quantizes in different ways; {REMEDY}")]
    problems = [*_cuts(step, members), *_unequal_scales(step, members), *_companions(step, members)]
    coding = step.coding
    if coding.values:
        outputs = tuple(_named(output, _parts(output, members)) for output in step.outputs)
    else:
        outputs = tuple(_copied_output(output, members) for output in step.outputs)
    scale = next((output.spec.dtype for output in outputs if output.part == "scale"), "")
    if not coding.values and format_.weight[0].scale_dtype == "float32":
        coding = coding if coding.scale_dtype == scale else changed(coding, scale_dtype=scale)
    step = changed(step, outputs=outputs, coding=coding)
    return step, [(site.module, f"{problem}; {REMEDY}") for problem in problems]


def _cuts(step: Step, members: Sequence[QuantizedWeight]) -> list[str]:
    """Slices must not cut through blocks, nor through pairs of rows that share a byte."""
    assert step.format and step.site
    first, problems = step.format.weight[0], []
    turned = step.site.layout != "out_in"
    if any(not part.source for part in step.inputs):
        problems.append("the target pads it with zeros, which the source has no codes for")
    if any(stored.turned != turned for stored in members) or any(part.transposed for part in step.inputs) > turned:
        problems.append("the source stores it [out, in], the architecture [in, out]")
    pairs = 2 if packing(first, "out_in", step.layout is Layout.WHOLE, step.coding) == "out" else 1
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


def spans(part: Slice, stored: QuantizedWeight) -> tuple[tuple[int, int], tuple[int, int]]:
    """The range of `out` and the range of `in` that a slice takes of a stored weight."""
    out, in_ = (part.cols, part.rows) if stored.turned else (part.rows, part.cols)
    return out or (0, stored.spec.shape[0]), in_ or (0, stored.spec.shape[1])


def _unequal_scales(step: Step, members: Sequence[QuantizedWeight]) -> list[str]:
    """Matrices that are joined into one must have the same scale if one scale covers the matrix."""
    assert step.format
    if len(members) == 1 or not has_tensor_scale(step.format):
        return []
    part = "scale" if step.format.weight[0].per == "tensor" else "scale_2"
    scales = {stored.parts[part].read().tobytes() for stored in members}
    names = ", ".join(stored.module for stored in members)
    return [f"joins {names}, whose weights have different scales, under one scale"] if len(scales) > 1 else []


def _companions(step: Step, members: Sequence[QuantizedWeight]) -> list[str]:
    """The target must write every companion tensor that the source has, and the source must have those it writes."""
    wanted = {output.part for output in step.outputs}
    problems = ["codes are not copied into the words of AWQ and GPTQ"] if "zeros" in wanted else []
    if any(stored.format.weight[0].zero_points for stored in members):
        problems = ["codes with zero points are not copied"]
    # ggml's blocks have the scales between the codes
    problems += ["codes are not copied into ggml's blocks"] if step.coding.packed in BLOCKS else []
    for part, word in (("input_scale", "scale of its input"), ("pre_quant_scale", "pre-scale")):
        lacking = [stored.module for stored in members if part not in stored.parts]
        if part in wanted and lacking:
            problems.append(f"the source has no {word} of {', '.join(lacking)}")
        if part not in wanted and len(lacking) < len(members):
            problems.append(f"the target does not write its {word}")
    if "pre_quant_scale" in wanted and len(members) > 1:
        problems.append("joins matrices that have a pre-scale each")
    return problems


def _copied_output(output: Output, members: Sequence[QuantizedWeight]) -> Output:
    """The output as it is copied; its scales in the source's dtype if the target's does not hold them."""
    parts = _parts(output, members)
    output = _named(output, parts)
    floats = output.part == "input_scale" or (output.part == "scale" and members[0].scale_is_float)
    if not floats or not parts or output.spec.dtype in ("float32", parts[0].spec.dtype):
        return output
    return changed(output, spec=changed(output.spec, dtype=parts[0].spec.dtype))


def _parts(output: Output, members: Sequence[QuantizedWeight]) -> list[LazyTensor]:
    """The source's tensors that an output is made from."""
    part = "codes" if output.part == "weight" else output.part
    return [stored.parts[part] for stored in members if part in stored.parts]


def _named(output: Output, parts: Sequence[LazyTensor]) -> Output:
    names = ", ".join(part.spec.name for part in parts)
    return changed(output, expression=f"as stored: {names}") if parts else output
