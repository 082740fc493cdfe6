"""What a report says beyond parity, counted from plan, calibration and proof; must never read a weight.

Everything is a function of values that earlier stages made: equal runs say the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from bridge.budget import extent
from bridge.dtypes import DTYPES
from bridge.planning import Plan, Step
from bridge.report import Advice, Count, Coverage, Outliers, Parity, Storage
from bridge.show import grouped, pattern
from bridge.sources.shards import natural
from bridge.tables.arch import load_arch
from bridge.values import Slice

if TYPE_CHECKING:
    from bridge.quant.calibration import Calibration
    from bridge.sources import Source

ACCOUNTED = "source tensors written, tied or dropped for a reason"
FAR = 10.0  # a channel counts as an outlier from so many medians: one scale for all then leaves the others under 4 bits
STANDS_OUT = 2.0  # medians of damage from which a group of modules is worth a rule of its own
MOST = 10  # pieces of advice
CODES = ("weight", "shape")


def accounted(plan: Plan) -> Count:
    """How many source tensors have a place in the plan: read, tied to another, or dropped by name."""
    read = {part.source for step in plan.steps for part in step.inputs}
    known = read | plan.tied.keys() | plan.untied.keys() | plan.dropped.keys()
    return Count(ACCOUNTED, sum(name in known for name in plan.sources), len(plan.sources))


def storage(plan: Plan) -> tuple[Storage, ...]:
    """Bytes before and after by kind of tensor, in the order of the file; a slice that is read twice counts once."""
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
                values=sum(_values(step, plan) for step in group),
                was=", ".join(sorted(read)),
                now=", ".join(sorted({spec.dtype for spec in weights} or {output.spec.dtype for output in outputs})),
                before=before,
                codes=sum(output.spec.nbytes for output in outputs if output.part in CODES),
                scales=sum(output.spec.nbytes for output in outputs if output.part not in CODES),
            )
        )
    return tuple(rows)


def dtypes(plan: Plan) -> tuple[tuple[str, int, int], ...]:
    """(dtype, bytes in the source, bytes written), the most bytes first."""
    before, after = Counter[str](), Counter[str]()
    for spec in plan.sources.values():
        before[spec.dtype] += spec.nbytes
    for output in plan.outputs:
        after[output.spec.dtype] += output.spec.nbytes
    names = sorted(before.keys() | after.keys(), key=lambda name: (-before[name] - after[name], name))
    return tuple((name, before[name], after[name]) for name in names)


def _values(step: Step, plan: Plan) -> int:
    return sum(rows * columns for rows, columns in (extent(part, plan.sources) for part in step.inputs))


def _stored(part: Slice, plan: Plan, seen: set[Slice]) -> int:
    """Bytes that a slice has in the source, 0 where they were counted before."""
    place = Slice(part.source, part.rows, part.cols, expert=part.expert, step=part.step)
    if not part.source or place in seen:
        return 0
    seen.add(place)
    rows, columns = extent(part, plan.sources)
    return (rows * columns * DTYPES[plan.sources[part.source].dtype].bits + 7) // 8


def outliers(calibration: Calibration | None) -> tuple[Outliers, ...]:
    """Modules whose input has channels far above the others, the farthest first."""
    found = []
    for module, amax in calibration.smoothing_amax.items() if calibration else ():
        middle = float(np.median(amax))
        far = [int(at) for at in np.argsort(-amax, kind="stable") if middle > 0 and amax[at] >= FAR * middle]
        if far:
            found.append(Outliers(module, middle, float(amax[far[0]]), tuple(far), amax.size))
    return tuple(sorted(found, key=lambda row: (-row.largest / row.median, row.module)))


def coverage(calibration: Calibration | None) -> tuple[Coverage, ...]:
    """Tokens by expert of every layer that has experts, as far as the calibration counted them."""
    counted = calibration.expert_tokens if calibration else {}
    return tuple(Coverage(name, tuple(map(int, counted[name]))) for name in sorted(counted, key=natural))


def advice(plan: Plan, parity: Parity | None) -> tuple[Advice, ...]:
    """Which modules to leave unquantized: those that hurt far more than the median, the most gained per byte first.

    Damage is that of the modules' own outputs where they were run, else the error of their weights. What reads one
    input is kept together, since runtimes fuse it.
    """
    damage = _damage(plan, parity) if parity else {}
    total = sum(value**2 for value in damage.values())
    middle = float(np.median(list(damage.values()))) if damage else 0.0
    found = []
    for steps in _fused(plan):
        modules = tuple(dict.fromkeys(step.site.module for step in steps if step.site))
        worst = max(damage.get(module, 0.0) for module in modules)
        if worst >= STANDS_OUT * middle and worst > 0:
            more = sum(_stored(part, plan, set()) for step in steps for part in step.inputs)
            more -= sum(step.nbytes for step in steps)
            share = sum(damage.get(module, 0.0) ** 2 for module in modules) / total
            found.append(Advice(modules, worst, share, max(more, 0)))
    return tuple(sorted(found, key=lambda row: (-row.share / (row.bytes + 1), row.modules))[:MOST])


def _fused(plan: Plan) -> list[list[Step]]:
    """Quantized steps by what they read: by the architecture's table; each alone where it has none."""
    table = load_arch(plan.architecture)
    row = {role: number for number, reads in enumerate(table.reads if table else ()) for role in reads.readers}

    def reads(step: Step) -> tuple[object, ...]:
        site = step.site
        assert site
        numbers = {row.get(role) for role in site.roles}
        (number,) = numbers if len(numbers) == 1 else (None,)
        return (site.module,) if number is None or site.layer is None else (site.layer, site.expert, number)

    return grouped(plan.quantized, reads)


def _damage(plan: Plan, parity: Parity) -> dict[str, float]:
    if parity.layers:
        return {module: value for module, value in parity.layers if np.isfinite(value)}
    modules = {o.spec.name: step.site.module for step in plan.quantized for o in step.outputs if step.site}
    rows = ((modules.get(row.name.rpartition(": ")[2]), row.decibels) for row in parity.tensors)
    return {module: 10 ** (-decibels / 20) for module, decibels in rows if module and decibels != -math.inf}


def made_from(plan: Plan, source: Source, calibration: Calibration | None) -> dict[str, str]:
    """Where the result comes from: source, arguments, calibration."""
    said = {
        "source": source.where,
        "fingerprint of the source": source.fingerprint,
        "architecture": plan.architecture,
        "arguments": ", ".join(_arguments(plan)),
        "scheme": f"{plan.scheme} {plan.scheme_digest}".strip(),
    }
    if calibration and plan.scheme_digest:
        made = calibration.provenance
        said["calibration"] = f"scheme {made.scheme}, {made.samples} sequences of {made.sequence} tokens, {made.dtype}"
        said["calibration data"] = made.data_digest or "unknown"
    return {what: value for what, value in said.items() if value}


def _arguments(plan: Plan) -> Iterator[str]:
    yield f"target={plan.target}"
    yield f"quant={plan.scheme}"
    kv: Iterable[str] = {step.kv.dtype for step in plan.steps if step.kv}
    yield from (f"kv={name}" for name in sorted(kv))
    yield from (f"{name}={value}" for name, value in plan.options.items())
