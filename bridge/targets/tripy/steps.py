"""The steps of target `tripy`: every tensor of a strict state dict."""

from __future__ import annotations

from dataclasses import replace

from bridge.core.dtypes import DTYPES
from bridge.core.values import Encoding, Format, Site, Slice, TensorSpec
from bridge.planning.plan import Output, Step
from bridge.planning.target import Draft, Drafted
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.tables.architectures.structure import canonical_names
from bridge.targets.tripy import formats


def drafted(draft: Draft) -> Drafted:
    """Make the steps of a plan; a problem names its module."""
    result = Drafted()
    for spec, site in draft.copied():
        format_ = draft.formats.get(site.weight) if site else None
        if site and isinstance(format_, Format):
            _quantized(spec, site, formats.fitted(format_, draft.options.linear), draft, result)
        else:
            result.steps.append(_plain(spec, spec.name, site, draft))
    written = {output.spec.name for step in result.steps for output in step.outputs}
    for alias, name in draft.structure.tied.items():
        if alias not in written and name in draft.specs:
            result.steps.append(_plain(draft.specs[name], alias, draft.sites.get(alias), draft))
    result.steps = _canonical(result.steps, draft)
    return result


def _canonical(steps: list[Step], draft: Draft) -> list[Step]:
    """Name tensors as the model's class does: the hub's gpt2 was saved without `transformer.`, modules have it."""
    outputs = [output for step in steps for output in step.outputs]
    changed = canonical_names(draft.config, (output.spec.name for output in outputs))
    if not changed:
        return steps

    def renamed(output: Output) -> Output:
        name = changed.get(output.spec.name, output.spec.name)
        return replace(output, spec=replace(output.spec, name=name))

    return [replace(step, outputs=tuple(map(renamed, step.outputs))) for step in steps]


def _plain(spec: TensorSpec, name: str, site: Site | None, draft: Draft) -> Step:
    """An unquantized tensor in the model's dtype; a Conv1D's matrix is transposed to [out, in]."""
    transposed = bool(site and site.layout == "in_out")
    dtype = draft.options.dtype if DTYPES[spec.dtype].floating else spec.dtype
    text = f"transpose({spec.name})" if transposed else spec.name
    text = text if dtype == spec.dtype else f"cast({text}, {dtype})"
    output = Output(TensorSpec(name, spec.shape[::-1] if transposed else spec.shape, dtype), "weight", text)
    source = Slice(spec.name, module=site.module if site else "", transposed=transposed)
    return Step((source,), (output,), site, kept=draft.why_plain(spec, site))


def _quantized(spec: TensorSpec, site: Site, format_: Format, draft: Draft, result: Drafted) -> None:
    out, in_ = spec.shape[::-1] if site.layout == "in_out" else spec.shape
    problems = formats.incompatibilities(format_, (out, in_))
    if not DTYPES[spec.dtype].floating or DTYPES[spec.dtype].bits not in (16, 32):
        problems = [f"a weight of dtype {spec.dtype} cannot be quantized; keep this module in a recipe"]
    if problems:
        result.problems += [(site.module, problem) for problem in problems]
        result.dropped[spec.name] = "could not be planned"
        return
    # weights that end up [in, out] are quantized in the source's axes, all others row by row along `out`
    transposed, stored_transposed = formats.transposed(format_), site.layout == "in_out"
    step = Step(
        (Slice(spec.name, module=site.module, transposed=stored_transposed and not transposed),),
        tuple(formats.outputs(format_, site.weight, (out, in_), spec.name, draft.options.dtype)),
        site,
        format_,
        coding=Encoding(values=draft.options.dtype),
        transpose=transposed and not stored_transposed,
        shares=site.shares if has_tensor_scale(format_) else "",
    )
    result.steps.append(step)
