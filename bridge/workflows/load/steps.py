"""Plan what each tensor of a live model is made from."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bridge.api.plans import plan as make_plan
from bridge.core.dtypes import DTYPES, FLOATS
from bridge.core.errors import PlanError
from bridge.core.values import Slice, TensorSpec
from bridge.planning.memory import extent
from bridge.planning.plan import Output, Step
from bridge.sources.live_models.checkpoint_names import Origin, live_names, tied_names
from bridge.sources.source import Source
from bridge.streaming.run import equal_bits
from bridge.workflows.load.fill import row_axes
from bridge.workflows.load.meaning import unlike_config

if TYPE_CHECKING:
    from bridge.planning.plan import Plan
    from bridge.sources.memory.megatron_parts import Part
    from bridge.workflows.load.parts import Run

STACK = 3  # axes of all experts of a layer
_SLAB = re.compile(r"\[\d+\]\.(\d+)")
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias)$")
COMPUTED_NOW = "a buffer of older checkpoints; transformers computes it"
COMPUTED = "transformers computes it from the checkpoint's tensors; load a checkpoint that it saved (save_pretrained)"


@dataclass
class Steps:
    """A live model's tensors by name, and the step that makes each. `dropped`: of the checkpoint -> why not read."""

    of: dict[str, Step] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Tensors without a place, and why."""
    plan: Plan | None = None
    """Of another dialect: what it was made from."""


def hf_steps(model: Any, source: Source) -> Steps:
    """Steps of a model of transformers, whose experts may be stacked where the checkpoint has each by itself."""
    origins, found = live_names(model, source.specs), Steps()
    found.problems += unlike_config(model.config, source.config)
    _place_others(model, source, origins, found)
    pieces: dict[str, list[tuple[int, Slice]]] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")}
    for name, origin in origins.items():
        if found.dropped.get(name):
            continue
        if (stored := source.specs[name].shape) != origin.spec.shape:
            why = f"has shape {origin.spec.shape} in the model, {stored} in the checkpoint"
            found.problems += [(one, why) for one in dict.fromkeys([name, *(part.live for part in origin.parts)])]
            continue
        placed = [*_placed(name, origin, source.specs[name].shape, shapes)]
        if not placed:
            found.problems.append((name, COMPUTED))
        for live, row, one in placed:
            pieces.setdefault(live, []).append((row, one))
    for live, rows in pieces.items():
        rows.sort(key=lambda pair: pair[0])
        heights = [extent(one, source.specs)[0] for _, one in rows]
        if [row for row, _ in rows] != [0, *itertools.accumulate(heights[:-1])]:
            found.problems.append((live, "the checkpoint lacks rows of it, or has some twice"))
        slices = tuple(one for _, one in rows)
        spec = source.specs[slices[0].source]
        found.of[live] = Step(slices, (Output(TensorSpec(live, shapes[live], spec.dtype), "weight", ""),))
    return found


def _place_others(model: Any, source: Source, origins: Mapping[str, Origin], found: Steps) -> None:
    """Say of tensors that the model has no name for why they are not read; an alias is read where it is alone."""
    tied, patterns = tied_names(model), getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in source.specs:
        if name in origins:
            continue
        if name in tied:
            found.dropped[name] = f"tied to {tied[name]}"
        elif any(re.search(pattern, name) for pattern in patterns):
            found.dropped[name] = f"{type(model).__name__} of transformers leaves it out"
        elif BUFFERS.search(name):
            found.dropped[name] = COMPUTED_NOW
        else:
            found.problems.append((name, f"{type(model).__name__} has no place for it"))


def _placed(
    name: str, origin: Origin, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, int, Slice]]:
    """Yield a live tensor, the first of its rows, and what of a checkpoint's tensor they are; nothing if computed."""
    at = 0  # along the axis on which the checkpoint joins parts
    for part in () if origin.computed else origin.parts:
        live, index = shapes[part.live], part.index or tuple((0, n) for n in shapes[part.live])
        ranges = [one for one in index if isinstance(one, tuple)]
        order = part.order or tuple(range(len(ranges)))
        extents = [ranges[axis][1] - ranges[axis][0] for axis in order]
        joined = (at, at + extents[origin.axis]) if len(origin.parts) > 1 else None
        at += extents[origin.axis] if extents else 0
        whole = all(one == (0, n) for one, n in zip(index, live, strict=True))
        if whole and order == (*range(len(live)),) and origin.axis == 0:
            yield part.live, 0, Slice(name, rows=joined)
        elif len(live) == STACK and joined is None and index[2] == (0, live[2]):
            yield from _of_stack(name, part.live, index, order, live)
        elif len(live) == 2 and order == (0, 1) and index[1] == (0, live[1]) and origin.axis == 0:
            yield part.live, index[0][0] if isinstance(index[0], tuple) else index[0], Slice(name, rows=joined)
        else:
            return


def _of_stack(
    name: str, live: str, index: Sequence[Any], order: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[str, int, Slice]]:
    """Of a stack of experts: rows of one, or the same rows of each; nothing for another order of axes."""
    first = index[1][0]
    if isinstance(index[0], int) and order in ((0, 1), (1, 0)):
        yield live, index[0] * shape[1] + first, Slice(name, transposed=order == (1, 0))
    elif isinstance(index[0], tuple) and order in ((0, 1, 2), (0, 2, 1)):
        for number, expert in enumerate(range(*index[0])):
            yield live, expert * shape[1] + first, Slice(name, expert=number, transposed=order == (0, 2, 1))


def dialect_steps(source: Source, target: str, names: Iterable[str], tries: Sequence[dict[str, Any]]) -> Steps:
    """Steps of a model in another dialect's names, with the first options of the target that give all `names`.

    None gives all: those that give most.
    """
    wanted, best, most = {*names}, Steps(), -1
    for options in tries:
        steps = _steps_of(make_plan(source, target, "none", **options))
        known = len(wanted & steps.of.keys())
        if known > most:
            best, most = steps, known
        if known == len(wanted):
            break
    return best


def _steps_of(plan: Plan) -> Steps:
    """The steps of a plan by the names of a live model, in which layers are apart."""
    steps = {}
    for step in plan.steps:
        (output,) = step.outputs
        name, shape = _SLAB.sub(r".\1", output.spec.name), output.spec.shape
        shape = shape if name == output.spec.name else shape[1:]
        steps[name] = replace(step, outputs=(replace(output, spec=replace(output.spec, name=name, shape=shape)),))
    steps |= {name: steps[other] for name, other in plan.tied.items() if other in steps}
    return Steps(steps, {name: why for name, why in plan.dropped.items() if name in plan.sources}, plan=plan)


def joined_steps(parts: Mapping[str, Part], joined: Mapping[str, Sequence[Run]], steps: Steps, source: Source) -> None:
    """Add steps of parameters that join rows of tensors, and drop those of the tensors."""
    for name, runs in joined.items():
        if any(run.name not in steps.of for run in runs):
            continue  # told as a tensor without a value
        slices = [one for run in runs for one in _rows_of(steps.of[run.name], run.begin, run.end, source.specs)]
        first = steps.of[runs[0].name].outputs[0]
        spec = replace(first.spec, name=name, shape=parts[name].shape)
        steps.of[name] = Step(tuple(slices), (replace(first, spec=spec),))
    for name in {run.name for runs in joined.values() for run in runs} - joined.keys():
        steps.of.pop(name, None)


def _rows_of(step: Step, first: int, stop: int, specs: Mapping[str, TensorSpec]) -> Iterator[Slice]:
    """Yield the slices that are rows `first` to `stop` of a step's matrix."""
    begin = 0
    for one in step.inputs:
        height = extent(one, specs)[0]
        a, b = max(first, begin) - begin, min(stop, begin + height) - begin
        begin += height
        if (a, b) == (0, height):
            yield one
        elif a < b:
            if one.step > 1 or (one.rope and (a % one.rope or b % one.rope)):
                raise PlanError(f"{step.outputs[0].spec.name}: its rows cannot be cut at {a} and {b}")
            at = ((one.cols if one.transposed else one.rows) or (0, 0))[0]
            cut = at + a, at + b
            yield replace(one, cols=cut) if one.transposed else replace(one, rows=cut)


def settled(part: Part, step: Step, specs: Mapping[str, TensorSpec]) -> Step:
    """The step in the form that fills this part; PlanError if it makes another shape, or is cut across columns."""
    whole, stored = step.outputs[0].spec, specs[step.source].dtype if step.source else ""
    if part.shape != whole.shape:
        raise PlanError(f"has shape {part.shape} in the model, {whole.shape} in the checkpoint")
    if stored and _kind(stored) != _kind(part.dtype):
        raise PlanError(f"is {part.dtype} in the model, {stored} in the checkpoint; no cast turns one into the other")
    shape, local = whole.shape or (1,), tuple(part.tensor.shape) or (1,)
    for tried in (step, _apart(step, specs)):
        axes = row_axes(tried, shape, specs)
        if axes and local[axes + 1 :] == shape[axes + 1 :]:
            return tried
    if not row_axes(step, shape, specs):
        rows = "rows of it" if math.prod(shape) else "it"
        raise PlanError(f"the checkpoint's tensors do not fill all {rows}")
    raise PlanError(f"this process holds {local} of {shape}, which are not rows and columns of the stored matrices")


def _kind(dtype: str) -> str:
    """What `Tensor.copy_` casts into each other without losing a scale: numbers of one kind; codes by themselves."""
    if dtype in (*FLOATS, "float64"):
        return "float"
    known = DTYPES.get(dtype)
    return dtype if known is None or known.floating or known.bits < 8 else "integer"


def _apart(step: Step, specs: Mapping[str, TensorSpec]) -> Step:
    """The step with each matrix of a whole stack by itself."""
    slices: list[Slice] = []
    for one in step.inputs:
        stack = one == Slice(one.source) and one.source and len(specs[one.source].shape) == STACK
        slices += [replace(one, expert=n) for n in range(specs[one.source].shape[0])] if stack else [one]
    return replace(step, inputs=tuple(slices))


def same_values(one: Step, other: Step, source: Source) -> bool:
    """Whether two steps make equal bits: each of their stored tensors is compared."""
    if one.shift != other.shift or len(one.inputs) != len(other.inputs):
        return False
    for first, second in zip(one.inputs, other.inputs, strict=True):
        if replace(first, source="") != replace(second, source="") or bool(first.source) != bool(second.source):
            return False
        if first.source != second.source and not _equal(source, first.source, second.source):
            return False
    return True


def _equal(source: Source, name: str, other: str) -> bool:
    one, two = source.specs[name], source.specs[other]
    if one.shape or two.shape:
        return equal_bits(source, one, source, two)
    return one.dtype == two.dtype and source.read(name).tobytes() == source.read(other).tobytes()  # has no rows
