"""The figures of a report beyond parity, from plan, calibration and verification.

Reads no weight, and depends only on values of earlier stages, so that equal runs give equal figures.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.text import grouped, natural, pattern
from bridge.core.values import Slice
from bridge.planning.memory import extent
from bridge.planning.plan import Plan, Step
from bridge.quant.calibration import Calibration
from bridge.reporting.report import Advice, Coverage, Outliers, Storage
from bridge.sources.source import Source
from bridge.tables.architectures.arch import load_arch
from bridge.verification.parity import Count, Parity

ACCOUNTED = "source tensors written, tied or dropped for a reason"
OUTLIER = 10.0  # medians; with such a channel, one scale for all channels leaves the others less than 4 bits
STANDS_OUT = 2.0  # medians of damage; above, a group of modules is worth a rule of its own
MAX_ADVICE = 10  # groups of modules
CODES = ("weight", "shape")


def accounted(plan: Plan) -> Count:
    """How many source tensors have a place in the plan: read, tied to another, or dropped by name."""
    read = {part.source for step in plan.steps for part in step.inputs}
    known = read | plan.tied.keys() | plan.untied.keys() | plan.dropped.keys()
    return Count(ACCOUNTED, sum(name in known for name in plan.sources), len(plan.sources))


def storage(plan: Plan) -> tuple[Storage, ...]:
    """Bytes before and after by kind of tensor, in file order; a slice that is read twice counts once."""
    seen: set[Slice] = set()
    rows = []
    for group in grouped(plan.steps, lambda step: pattern(step.outputs[0].spec.name)):
        outputs = [output for step in group for output in step.outputs]
        before = sum(_stored(part, plan, seen) for step in group for part in step.inputs)
        weights = [output.spec for output in outputs if output.part == "weight"]
        read = {plan.sources[step.source].dtype for step in group if step.source}
        rows.append(
            Storage(
                kind=pattern(group[0].outputs[0].spec.name),
                tensors=len(weights) or len(outputs),
                values=sum(math.prod(extent(part, plan.sources)) for step in group for part in step.inputs),
                was=", ".join(sorted(read)),
                now=", ".join(sorted({spec.dtype for spec in weights} or {output.spec.dtype for output in outputs})),
                before=before,
                codes=sum(output.spec.nbytes for output in outputs if output.part in CODES),
                scales=sum(output.spec.nbytes for output in outputs if output.part not in CODES),
            )
        )
    return tuple(rows)


def dtypes(plan: Plan) -> tuple[tuple[str, int, int], ...]:
    """(dtype, bytes in the source, bytes written), largest first."""
    before, after = Counter[str](), Counter[str]()
    for spec in plan.sources.values():
        before[spec.dtype] += spec.nbytes
    for output in plan.outputs:
        after[output.spec.dtype] += output.spec.nbytes
    names = sorted(before.keys() | after.keys(), key=lambda name: (-before[name] - after[name], name))
    return tuple((name, before[name], after[name]) for name in names)


def _stored(part: Slice, plan: Plan, seen: set[Slice]) -> int:
    """Bytes of a slice in the source; 0 if they were counted before."""
    stored = Slice(part.source, part.rows, part.cols, expert=part.expert, step=part.step)
    if not part.source or stored in seen:
        return 0
    seen.add(stored)
    rows, columns = extent(part, plan.sources)
    return (rows * columns * DTYPES[plan.sources[part.source].dtype].bits + 7) // 8


def outliers(calibration: Calibration | None) -> tuple[Outliers, ...]:
    """Modules whose input has channels far above the others, the largest ratio first."""
    rows = []
    for module, amax in calibration.smoothing_amax.items() if calibration else ():
        median = float(np.median(amax))
        channels = [int(i) for i in np.argsort(-amax, kind="stable") if median > 0 and amax[i] >= OUTLIER * median]
        if channels:
            rows.append(Outliers(module, median, float(amax[channels[0]]), tuple(channels), amax.size))
    return tuple(sorted(rows, key=lambda row: (-row.largest / row.median, row.module)))


def coverage(calibration: Calibration | None) -> tuple[Coverage, ...]:
    """Tokens by expert of every layer whose experts the calibration counted."""
    counted = calibration.expert_tokens if calibration else {}
    return tuple(Coverage(name, tuple(map(int, counted[name]))) for name in sorted(counted, key=natural))


def advice(plan: Plan, parity: Parity) -> tuple[Advice, ...]:
    """Which modules to leave unquantized: damage far above the median, the largest gain per byte first.

    Damage is the error of the modules' own outputs if they were run, else of their weights. Modules that read the same
    input stay together, since runtimes fuse them.
    """
    damage = _damage(plan, parity)
    total = sum(value**2 for value in damage.values())
    median = float(np.median(list(damage.values()))) if damage else 0.0
    rows = []
    for steps in _fused(plan):
        modules = tuple(dict.fromkeys(module for step in steps for module in step.modules))
        matrices = dict.fromkeys(step.matrix for step in steps)
        worst = max(damage.get(matrix, 0.0) for matrix in matrices)
        if worst >= STANDS_OUT * median and worst > 0:
            more = sum(_stored(part, plan, set()) for step in steps for part in step.inputs)
            more -= sum(step.nbytes for step in steps)
            share = sum(damage.get(matrix, 0.0) ** 2 for matrix in matrices) / total
            rows.append(Advice(modules, worst, share, max(more, 0)))
    return tuple(sorted(rows, key=lambda row: (-row.share / (row.bytes + 1), row.modules))[:MAX_ADVICE])


def _fused(plan: Plan) -> list[list[Step]]:
    """Quantized steps grouped by their input, from the architecture's table; without a table each step alone."""
    table = load_arch(plan.architecture)
    group_of = {role: number for number, inputs in enumerate(table.inputs if table else ()) for role in inputs.readers}

    def group(step: Step) -> tuple[object, ...]:
        site = step.site
        assert site
        numbers = {group_of.get(role) for role in site.roles}
        (number,) = numbers if len(numbers) == 1 else (None,)
        return (site.module,) if number is None or site.layer is None else (site.layer, site.expert, number)

    return grouped(plan.quantized, group)


def _damage(plan: Plan, parity: Parity) -> dict[str, float]:
    if parity.layers:
        return {module: value for module, value in parity.layers if np.isfinite(value)}
    matrices = {o.spec.name: step.matrix for step in plan.quantized for o in step.outputs}
    rows = ((matrices.get(row.name.rpartition(": ")[2]), row.decibels) for row in parity.tensors)
    return {matrix: 10 ** (-decibels / 20) for matrix, decibels in rows if matrix and decibels != -math.inf}


def provenance(plan: Plan, source: Source, calibration: Calibration | None) -> dict[str, str]:
    """The provenance of the output: source, arguments, calibration."""
    kv = sorted({step.kv.dtype for step in plan.steps if step.kv})
    arguments = [("target", plan.target), ("quant", plan.scheme), *(("kv", name) for name in kv), *plan.options.items()]
    facts = {
        "source": source.where,
        "fingerprint of the source": source.fingerprint,
        "architecture": plan.architecture,
        "arguments": ", ".join(f"{name}={value}" for name, value in arguments),
        "scheme": f"{plan.scheme} {plan.scheme_digest}".strip(),
    }
    if calibration and plan.scheme_digest:
        of = calibration.provenance
        facts["calibration"] = f"scheme {of.scheme}, {of.samples} sequences of {of.sequence} tokens, {of.dtype}"
        facts["calibration samples"] = of.chosen
        facts["calibration data"] = of.data_digest or "unknown"
    return {what: value for what, value in facts.items() if value}
