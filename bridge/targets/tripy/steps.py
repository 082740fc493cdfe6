"""The steps of target `tripy`: every tensor of a strict state dict, matrices [out, in], tied ones under each name."""

from __future__ import annotations

from dataclasses import replace

from bridge.dtypes import DTYPES
from bridge.planning import Draft, Drafted, Output, Step
from bridge.quant.scheme import has_tensor_scale
from bridge.tables.structure import canonical_names
from bridge.tripy import formats
from bridge.values import Coding, Format, Site, Slice, TensorSpec


def drafted(draft: Draft) -> Drafted:
    """Make the steps of a plan; a problem names its module."""
    made = Drafted()
    for spec, site in draft.carried():
        format_ = draft.formats.get(site.weight) if site else None
        if site and isinstance(format_, Format):
            _quantized(spec, site, formats.fitted(format_, draft.options.linear), draft, made)
        else:
            made.steps.append(_plain(spec, spec.name, site, draft))
    written = {output.spec.name for step in made.steps for output in step.outputs}
    for alias, name in draft.structure.tied.items():
        if alias not in written and name in draft.specs:
            made.steps.append(_plain(draft.specs[name], alias, draft.sites.get(alias), draft))
    made.steps = _as_the_class_spells(made.steps, draft)
    return made


def _as_the_class_spells(steps: list[Step], draft: Draft) -> list[Step]:
    """Name the tensors as the model's class does: the hub's gpt2 was saved without `transformer.`, modules have it."""
    outputs = [output for step in steps for output in step.outputs]
    changed = canonical_names(draft.config, (output.spec.name for output in outputs))
    if not changed:
        return steps

    def renamed(output: Output) -> Output:
        name = changed.get(output.spec.name, output.spec.name)
        return replace(output, spec=replace(output.spec, name=name))

    return [replace(step, outputs=tuple(map(renamed, step.outputs))) for step in steps]


def _plain(spec: TensorSpec, name: str, site: Site | None, draft: Draft) -> Step:
    """A tensor that stays unquantized, in the model's dtype; a Conv1D's matrix is turned to [out, in]."""
    turned = bool(site and site.layout == "in_out")
    dtype = draft.options.dtype if DTYPES[spec.dtype].floating else spec.dtype
    text = f"transpose({spec.name})" if turned else spec.name
    text = text if dtype == spec.dtype else f"cast({text}, {dtype})"
    output = Output(TensorSpec(name, spec.shape[::-1] if turned else spec.shape, dtype), "weight", text)
    module = site.module if site else ""
    return Step(
        (Slice(spec.name, module=module, transposed=turned),), (output,), site, kept=draft.why_plain(spec, site)
    )


def _quantized(spec: TensorSpec, site: Site, format_: Format, draft: Draft, made: Drafted) -> None:
    out, in_ = spec.shape[::-1] if site.layout == "in_out" else spec.shape
    problems = formats.misfits(format_, (out, in_))
    if not DTYPES[spec.dtype].floating or DTYPES[spec.dtype].bits not in (16, 32):
        problems = [f"a weight of dtype {spec.dtype} cannot be quantized; keep this module in a recipe"]
    if problems:
        made.problems += [(site.module, problem) for problem in problems]
        made.dropped[spec.name] = "could not be planned"
        return
    # what is stored [in, out] in the end is coded from the source's own axes; all else row by row along `out`
    turned, stored_turned = formats.turned(format_), site.layout == "in_out"
    step = Step(
        (Slice(spec.name, module=site.module, transposed=stored_turned and not turned),),
        tuple(formats.outputs(format_, site.weight, (out, in_), spec.name, draft.options.dtype)),
        site,
        format_,
        coding=Coding(values=draft.options.dtype),
        transpose=turned and not stored_turned,
        shares=site.shares if has_tensor_scale(format_) else "",
    )
    made.steps.append(step)
