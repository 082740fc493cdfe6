"""Make a plan from source, structure, scheme and target.

Everything that does not fit is collected into one error; bytes on disk and peak memory come from headers alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from bridge.core.errors import PlanError, SchemeError
from bridge.core.output.names import WRITES
from bridge.core.records import changed
from bridge.core.remote.path import memory_ahead
from bridge.core.text import fold_layers, fold_problems, named
from bridge.core.values import CACHE, Format, Structure, TensorSpec, with_positive_scales
from bridge.planning.drafts import DRAFT, UNMEASURED, check_rules, with_drafts
from bridge.planning.memory import STEP_BYTES, working_set
from bridge.planning.passthrough import (
    REMEDY,
    PassthroughScheme,
    carried_entries,
    copied,
    entry_problems,
    passthrough_notes,
    ungrouped,
)
from bridge.planning.plan import PASSTHROUGH, STACKED, Plan, Step
from bridge.planning.target import Draft, Drafted, Planner
from bridge.quant.schemes.scheme import Scheme, is_measured
from bridge.sources.source import Source

POSITIVE_SCALES = "scales stay positive, although the scheme takes either sign: {who} takes no others"
CHOSEN_CODES = (
    "calibration chooses codes for scales of either sign, which this layout does not have; use int4:imatrix, or write "
    "compressed-tensors: --target hf --format compressed-tensors"
)


@dataclass(frozen=True)
class PlanInputs:
    """What a plan is made from.

    `structure` comes from `bridge.tables.architectures.structure` or, for an architecture without a table, from
    `bridge.planning.trace`. `scheme` is bound to the structure's sites (`Scheme.bound`); None converts without
    quantizing. `options` is an instance of `target.Options`.
    """

    source: Source
    structure: Structure
    target: Planner
    scheme: Scheme | None
    options: Any
    notes: tuple[str, ...] = ()
    """Sentences on draft layers, for the plan."""
    positive: bool = False
    """Whether the program that is asked for reads positive scales alone."""

    def refined(self) -> PlanInputs:
        """The same for quantizing: fused modules split, and a tied head its own tensor, no longer the embedding's.

        Draft layers are among the modules if they are kept.
        """
        structure, notes = with_drafts(self.structure, self.source, self.options, self.target.name)
        check_rules(self.scheme, structure)
        scheme = self.scheme.bound(structure.sites) if self.scheme else None
        structure = ungrouped(structure, scheme)
        sites = [
            changed(site, weight=alias) if (alias := f"{site.module}.weight") in structure.tied else site
            for site in structure.sites
        ]
        return replace(self, structure=replace(structure, sites=tuple(sites)), scheme=scheme, notes=notes)


def check_weights(specs: Mapping[str, TensorSpec], structure: Structure, scheme: Scheme | None) -> None:
    """SchemeError for matrices in float64, which no scheme quantizes, before a target says which dtypes it has."""
    weights = [site.weight for site in structure.sites if scheme and isinstance(scheme.format_of(site), Format)]
    wide = [name for name in weights if (spec := specs.get(structure.tied.get(name, name))) and spec.dtype == "float64"]
    if wide:
        raise SchemeError(
            f"{named(wide)}: in float64, which no scheme quantizes; convert the model to float32 "
            "first, without a scheme: target='hf', dtype='fp32' (--target hf --dtype fp32)"
        )


def make_plan(inputs: PlanInputs) -> Plan:
    """Plan a conversion; PlanError or SchemeError lists everything that does not fit."""
    inputs = inputs.refined()
    formats, refused = _formats(inputs)
    _check_formats(inputs, formats, refused)
    drafted = _drafted(inputs, formats)
    if drafted.problems:
        scheme = inputs.scheme and inputs.scheme.name
        where = f"{inputs.structure.architecture} to {inputs.target.name}, scheme {scheme}"
        raise PlanError(_all(drafted.problems, where))
    plan = _sized(inputs, drafted)
    return replace(plan, notes=(*plan.notes, *drafted.notes), disk=plan.disk + drafted.disk)


def incompatibilities(inputs: PlanInputs) -> list[tuple[str, str]]:
    """What `make_plan` would refuse: the module (or a tensor, or the KV cache) and why."""
    inputs = inputs.refined()
    formats, refused = _formats(inputs)
    reasons = {module: reason for reason, modules in refused.items() for module in modules}
    formats |= {site.weight: reasons[site.module] for site in inputs.structure.sites if site.module in reasons}
    problems = _drafted(inputs, formats).problems
    return [*reasons.items(), *((what, why) for what, why in problems if what not in reasons)]


def _drafted(inputs: PlanInputs, formats: Mapping[str, Format | str]) -> Drafted:
    """The target's steps, which copy a quantized source if the scheme says so, and problems of tensors not written."""
    source, structure, target, scheme = inputs.source, inputs.structure, inputs.target, inputs.scheme
    dropped = {name: why for name, why in source.dropped.items() if name not in structure.tied} | structure.ignored
    draft = Draft(
        source.specs, source.config, structure, scheme, formats, dropped, inputs.options, source.side_files,
        source.folder,
    )  # fmt: skip
    drafted = target.draft(draft)
    dropped |= drafted.dropped
    steps = [_positive_where_unread(step, inputs.positive) for step in drafted.steps]
    changed = [one for one, made in zip(drafted.steps, steps, strict=True) if one is not made and one.site]
    who = "the program" if inputs.positive else f"what loads this layout of {target.name}"
    notes = [*drafted.notes, *([POSITIVE_SCALES.format(who=who)] if changed else [])]
    codes = [(one.site.module, CHOSEN_CODES) for one in changed if one.site and one.format and one.format.ordered]
    steps, not_copied = copied(steps, source.quantized, scheme)
    methods = _methods(inputs)
    problems = [*drafted.problems, *codes, *not_copied, *entry_problems(source.quantized, scheme, target.name, methods)]
    if scheme and scheme.kv:
        problems += [(CACHE, why) for why in [target.why_kv_unsupported(scheme.kv, structure, inputs.options)] if why]
    read = {part.source for step in steps for part in step.inputs}
    elsewhere = {*structure.tied, *dropped, *drafted.copies}
    lost = [name for name in source.specs if name not in read and name not in elsewhere]
    problems += [(name, f"target {target.name} does not write this tensor") for name in lost]
    return replace(drafted, steps=steps, dropped=dropped, problems=problems, notes=notes)


def _positive_where_unread(step: Step, everywhere: bool) -> Step:
    """A step with positive scales if nothing that reads its layout takes negative ones; else itself."""
    if step.format is None or (step.coding.signed and not everywhere):
        return step
    format_ = with_positive_scales(step.format)
    return step if format_ is step.format else replace(step, format=format_)


def _methods(inputs: PlanInputs) -> tuple[str, ...]:
    """Each `quant_method` that the target writes a config of."""
    methods = getattr(inputs.target, "methods", None)  # targets of third parties may lack it
    return tuple(methods(inputs.options)) if methods else ()


def _sized(inputs: PlanInputs, drafted: Drafted) -> Plan:
    source, structure, target, scheme = inputs.source, inputs.structure, inputs.target, inputs.scheme
    steps, dropped = drafted.steps, drafted.dropped
    own = {name for name in source.side_files if any(fnmatchcase(name, glob) for glob in (*target.writes, *WRITES))}
    untied = {output.spec.name for step in steps for output in step.outputs if output.part == "weight"}
    untied |= {step.site.weight for step in steps if step.site and step.format}
    largest = sorted((working_set(step, source.specs) for step in steps), reverse=True)[:2]
    side = [len(c) if isinstance(c, bytes) else c.stat().st_size for c in source.side_files.values()]
    return Plan(
        architecture=structure.architecture,
        target=target.name,
        scheme=scheme.name if scheme else "none",
        scheme_digest=scheme.digest if scheme else "",
        options=asdict(inputs.options),
        sources=dict(source.specs),
        steps=tuple(steps),
        tied={alias: name for alias, name in structure.tied.items() if alias not in untied} | drafted.copies,
        untied={alias: name for alias, name in structure.tied.items() if alias in untied},
        dropped=dropped
        | {name: f"side file: {target.name} writes its own" for name in source.side_files if name in own},
        side_files=tuple(name for name in sorted(source.side_files) if name not in own),
        notes=(
            *target.notes(structure, inputs.options),
            *inputs.notes,
            *([scheme.note] if scheme and scheme.note else []),
            *_expert_notes(scheme, steps),
            *passthrough_notes(source.quantized, scheme, steps, _methods(inputs)),
        ),
        memory=target.base_memory
        + drafted.memory
        + len(steps) * STEP_BYTES
        + sum(largest)
        + memory_ahead(source)
        + source.merge_memory,
        disk=sum(step.nbytes for step in steps) + sum(side),
        traced=structure.traced,
        dialect=source.dialect,
        cuts=structure.cuts,
        carried=carried_entries(source.quantized, scheme, _methods(inputs)),
        rotation=source.rotation,
    )


def _expert_notes(scheme: Scheme | None, steps: list[Step]) -> tuple[str, ...]:
    """What an algorithm leaves out; see `Scheme.format_of`."""
    sites = [step.site for step in steps if step.format and step.site]
    experts = any(site.expert is not None for site in sites)
    if scheme and experts and scheme.format.prescales:
        return (f"experts are not smoothed by {scheme.format.algorithm}: they share one input, as in ModelOpt",)
    if scheme and experts and scheme.format.clipped:
        return (f"experts are not clipped by {scheme.format.algorithm}, which sees single matrices, as in ModelOpt",)
    ours = scheme and scheme.format.ordered and not scheme.format.learned  # each expert by its own tokens
    if scheme and scheme.format.chosen and not ours and (experts or any(site.stacked for site in sites)):
        how = "have scales of the least weighted error" if scheme.format.ordered else "are rounded to nearest"
        return (f"experts {how}: {scheme.format.algorithm} takes modules with one matrix here",)
    return ()


def _formats(inputs: PlanInputs) -> tuple[dict[str, Format | str], dict[str, list[str]]]:
    """Weight name -> its format, or the reason why it is kept; reason why the target lacks a format -> the modules.

    A reason against the KV cache is added to them, because the target makes no draft then, which would report it.
    """
    structure, target, scheme, options = inputs.structure, inputs.target, inputs.scheme, inputs.options
    formats: dict[str, Format | str] = {}
    refused: dict[str, list[str]] = {}
    for site in structure.sites if scheme else ():
        assert scheme
        copies = isinstance(scheme, PassthroughScheme)
        format_: Format | str = DRAFT if site.keep == DRAFT and not copies else scheme.format_of(site)
        if site.unreached == UNMEASURED and not copies:
            if format_ == UNMEASURED or (isinstance(format_, Format) and is_measured(format_.input)):
                refused.setdefault(UNMEASURED, []).append(site.module)
                format_ = UNMEASURED
            elif isinstance(format_, Format):
                format_ = replace(format_, algorithm="max")  # what it measures, pre-scales or errors, is not known
        if isinstance(format_, Format):
            kept = target.why_kept(format_, site)
            reason = "" if kept else target.why_unsupported(format_, options) or _why_numbers(format_, target)
            if site.stacked and not (kept or reason):
                reason = STACKED if copies else target.why_stack_unsupported(format_, site, options)
            if reason:
                refused.setdefault(reason, []).append(site.module)
            format_ = kept or format_
        formats[site.weight] = format_
    if refused and scheme and scheme.kv and (why := target.why_kv_unsupported(scheme.kv, structure, options)):
        refused.setdefault(why, []).append(CACHE)
    return formats, refused


def _why_numbers(format_: Format, target: Planner) -> str:
    """Why a target has no place for the numbers of a format, whatever their dtypes; "" if it does."""
    if format_.rounding and format_.rounding not in getattr(target, "roundings", ()):
        return (
            f"its scales are those of {format_.rounding}, which target hf writes; one of our own names takes any target"
        )
    if format_.weight[0].zero_points and not getattr(target, "zero_points", False):
        return f"target {target.name} has no place for the zero points of its blocks"
    return ""


def _check_formats(inputs: PlanInputs, formats: Mapping[str, Format | str], refused: Mapping[str, list[str]]) -> None:
    """SchemeError if the target refuses a format, or if no site has one."""
    structure, target, scheme = inputs.structure, inputs.target, inputs.scheme
    if scheme is None:
        return
    if scheme.name == PASSTHROUGH and not isinstance(scheme, PassthroughScheme):
        raise SchemeError(
            f"{scheme.origin or scheme.name}: the name {PASSTHROUGH!r} means that a quantized source is copied; "
            "rename the recipe's file"
        )
    if refused:
        copies = isinstance(scheme, PassthroughScheme)
        stacked = [name for reason, names in refused.items() if STACKED in reason for name in names]
        hint = REMEDY if copies else _kept_by(stacked) if stacked else ""
        what = "copy the quantized source" if copies else f"express scheme {scheme.name}"
        problems = [(module, reason) for reason, modules in refused.items() for module in modules]
        text = _all(problems, f"target {target.name} cannot {what}")
        raise SchemeError(f"{text}\n  {hint}" if hint else text)
    if not any(isinstance(format_, Format) for format_ in formats.values()) and not scheme.kv:
        raise SchemeError(
            f"scheme {scheme.name} matches no weight of {structure.architecture}: nothing would be quantized.\n"
            f"  The model has {len(structure.sites)} quantizable modules"
            + "".join(f"\n  {m}" for m in fold_layers(site.module for site in structure.sites)[:8])
        )


def _kept_by(modules: list[str]) -> str:
    """The rule of a recipe that keeps modules unquantized in all layers."""
    globs = json.dumps(list(dict.fromkeys(f"*.{'.'.join(name.split('.')[-2:])}" for name in modules)))
    return f'a recipe keeps them: [[rule]], modules = {globs}, quant = "none"'


def _all(problems: list[tuple[str, str]], where: str) -> str:
    """One message for all problems of the stage, one line for modules that repeat in every layer."""
    return "\n".join([f"{where}:", *(f"  {line}" for line in fold_problems(problems))])
