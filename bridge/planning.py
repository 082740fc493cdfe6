"""The plan: every output tensor with its shape, dtype and expression, known before any weight is read; no framework.

A plan is a value. `make_plan` joins source, structure, scheme and target, collects everything that does not fit into
one error, and computes the bytes on disk and the peak of memory from headers alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.budget import working_set
from bridge.errors import PlanError, SchemeError, fold_layers, fold_problems
from bridge.quant.stored import OTHERWISE, StoredScheme, apart, carry, told
from bridge.remote.place import held_ahead
from bridge.values import CACHE, Coding, Format, Numeric, Site, Slice, Structure, TensorSpec, plain

if TYPE_CHECKING:
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source
    from bridge.targets import Target

# Files beside what the target writes; see bridge.finish and bridge.output.
# Runtimes load every *.safetensors beside config.json where there is no index: ours lies one level down.
CALIBRATION = "bridge/calibration.safetensors"
WRITES = ("bridge.json", CALIBRATION, "report.json", "report.html", "journal.jsonl")
DEFAULT_FILE = "model.safetensors"
STACKED = "holds all experts of a layer in one tensor, which is not written quantized"


@dataclass(frozen=True)
class Output:
    """One tensor to write: what part of its step it is, the expression that makes it, and the file it goes to.

    `part`: "weight" (codes, or the plain tensor), "scale", "scale_2", "input_scale", "pre_quant_scale", "k_scale",
    "v_scale", "kv_scale" (the larger of the two), "shape" (of the weight, as int64). `spec` has the shape as it is
    stored: what a part computes is reshaped to it.
    """

    spec: TensorSpec
    part: str
    expression: str
    file: str = DEFAULT_FILE

    @property
    def key(self) -> tuple[str, str]:
        """File and name: what is unique in a plan."""
        return self.file, self.spec.name


@dataclass(frozen=True)
class Step:
    """Makes the outputs of one matrix (or of attention modules' KV statistics, where `inputs` is empty).

    `inputs` are put under each other, along `out`. `format` is None for a tensor that is carried over; `kept` says why.
    `transpose` turns `[out, in]` into `[in, out]`. `shares`: steps of one such name share their per-tensor amax.
    `unified`: modules whose pre-scales are averaged and whose input amax is the largest of all, this step's among them.
    `folded`: modules whose pre-scale is multiplied into this norm, which multiplies by 1 + weight if `plus_one`.
    `shift` is added to a plain tensor. `attention`: the module whose K and V scales the step writes, for a
    cache coded as `kv`.
    """

    inputs: tuple[Slice, ...]
    outputs: tuple[Output, ...]
    site: Site | None = None
    format: Format | None = None
    kept: str = ""
    coding: Coding = field(default_factory=Coding)
    transpose: bool = False
    shares: str = ""
    unified: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    plus_one: bool = False
    shift: int = 0
    attention: str = ""
    kv: Numeric | None = None

    @property
    def source(self) -> str:
        """The first source tensor, "" where there is none: of zeros, and of statistics."""
        return next((part.source for part in self.inputs if part.source), "")

    @property
    def nbytes(self) -> int:
        return sum(output.spec.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Plan:
    """Everything a conversion will do. `memory` and `disk` are bytes; `dropped` maps source tensors to the reason.

    `tied` maps an alias to the tensor that is stored for both, `untied` that of one that is written for itself.
    `memory` is for two cores; each further one adds what a piece of rows takes, 20 MB. `dialect`: the source's own.

    >>> import bridge
    >>> plan = bridge.plan("examples/models/tiny-llama", target="trt", quant="fp8")
    >>> plan.quantized[0].outputs[0].spec.dtype
    'float8_e4m3fn'
    """

    architecture: str
    target: str
    scheme: str
    scheme_digest: str
    options: dict[str, Any]
    sources: dict[str, TensorSpec]
    steps: tuple[Step, ...]
    tied: dict[str, str] = field(default_factory=dict)
    untied: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    side_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    memory: int = 0
    disk: int = 0
    traced: bool = False
    dialect: str = "hf"

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(output for step in self.steps for output in step.outputs)

    @property
    def files(self) -> dict[str, list[TensorSpec]]:
        """File -> the tensors that it holds."""
        found: dict[str, list[TensorSpec]] = {}
        for output in self.outputs:
            found.setdefault(output.file, []).append(output.spec)
        return found

    @property
    def quantized(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.format)

    @property
    def digest(self) -> str:
        """sha256 of all that decides the written bytes; equal plans on equal inputs write equal files.

        Where the source lies and whose names it has do not: memory is more for what is read from afar.
        """
        decides = vars(self) | {"memory": 0, "dialect": ""}
        return hashlib.sha256(json.dumps(decides, sort_keys=True, default=vars).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, see `bridge.plan_json`."""
        return plain(self)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Draft:
    """What a target makes its steps from. `formats`: weight -> its format, or the reason why it is kept.

    `dropped`: source tensor -> why it is not carried, known before the target is asked.
    """

    specs: Mapping[str, TensorSpec]
    config: Mapping[str, Any]
    structure: Structure
    scheme: Scheme | None
    formats: Mapping[str, Format | str]
    dropped: Mapping[str, str]
    options: Any

    @property
    def sites(self) -> dict[str, Site]:
        """Weight -> its site."""
        return {site.weight: site for site in self.structure.sites}

    @property
    def quantized(self) -> dict[str, Format]:
        """Module -> its format, for those that are quantized."""
        found = ((site.module, self.formats.get(site.weight)) for site in self.structure.sites)
        return {module: format_ for module, format_ in found if isinstance(format_, Format)}

    def carried(self) -> Iterator[tuple[TensorSpec, Site | None]]:
        """Every source tensor that is written, with its site; a quantized head that is tied comes as its own, last."""
        tied, sites = self.structure.tied, self.sites
        for name, spec in self.specs.items():
            if name not in tied and name not in self.dropped:
                yield spec, sites.get(name)
        for site in self.structure.sites:
            if site.weight in tied and isinstance(self.formats.get(site.weight), Format):
                yield self.specs[tied[site.weight]], site

    def why_plain(self, spec: TensorSpec, site: Site | None) -> str:
        """Why a tensor is carried as it is."""
        kept = self.formats.get(site.weight) if site else None
        if isinstance(kept, str):
            return kept
        roles = self.structure.roles.get(spec.name, ())
        return roles[0].rsplit(".", 1)[0] + ": not a matrix multiplication" if roles else "not a matrix multiplication"


@dataclass
class Drafted:
    """What a target made of a draft: steps, source tensors that have no place in the output and why, what is wrong,
    and sentences for the plan that need the source's config.

    `problems`: the module or tensor that each is about, "" for none, and what is wrong with it.
    """

    steps: list[Step] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_plan(source: Source, structure: Structure, target: Target, scheme: Scheme | None, options: Any) -> Plan:
    """Plan the conversion of `source` to `target`; PlanError or SchemeError lists everything that does not fit.

    Args:
        structure: from `bridge.tables.structure` or, for an architecture without a table, `bridge.trace`.
        scheme: bound to the structure's sites (`Scheme.bound`); None converts without quantizing.
        options: an instance of `target.Options`.
    """
    structure = _own_heads(apart(structure, scheme))
    formats, refused = _formats(structure, target, scheme, options)
    _check_formats(structure, target, scheme, formats, refused)
    drafted = _drafted(source, structure, target, scheme, options, formats)
    if drafted.problems:
        where = f"{structure.architecture} to {target.name}, scheme {scheme and scheme.name}"
        raise PlanError(_all(drafted.problems, where))
    plan = _sized(source, structure, target, scheme, options, drafted.steps, drafted.dropped)
    return dataclasses.replace(plan, notes=(*plan.notes, *drafted.notes))


def misfits(
    source: Source, structure: Structure, target: Target, scheme: Scheme, options: Any
) -> list[tuple[str, str]]:
    """What `make_plan` would refuse: the module, or what is none (a tensor, the KV cache), and why."""
    structure = _own_heads(apart(structure, scheme))
    formats, refused = _formats(structure, target, scheme, options)
    found = {module: reason for reason, modules in refused.items() for module in modules}
    formats |= {site.weight: found[site.module] for site in structure.sites if site.module in found}
    problems = _drafted(source, structure, target, scheme, options, formats).problems
    return [*found.items(), *((what, why) for what, why in problems if what not in found)]


def _drafted(
    source: Source,
    structure: Structure,
    target: Target,
    scheme: Scheme | None,
    options: Any,
    formats: Mapping[str, Format | str],
) -> Drafted:
    """What the target made of it, carried over where the source is quantized, with all that has no place."""
    untold = {name: why for name, why in source.dropped.items() if name not in structure.tied}
    dropped = {**untold, **structure.ignored}
    drafted = target.draft(Draft(source.specs, source.config, structure, scheme, formats, dropped, options))
    dropped |= drafted.dropped
    steps, kept_from = carry(drafted.steps, source.quantized, scheme)
    problems = drafted.problems + kept_from
    if scheme and scheme.kv:
        problems += [(CACHE, why) for why in [target.refuse_kv(scheme.kv, structure, options)] if why]
    read = {part.source for step in steps for part in step.inputs}
    lost = [name for name in source.specs if name not in read and name not in structure.tied and name not in dropped]
    problems += [(name, f"target {target.name} has no place for it") for name in lost]
    return Drafted(steps, dropped, problems, drafted.notes)


def _own_heads(structure: Structure) -> Structure:
    """Let the site of a tied head name its own tensor: quantized, it is no longer the embedding's."""
    sites = [
        dataclasses.replace(site, weight=alias) if (alias := f"{site.module}.weight") in structure.tied else site
        for site in structure.sites
    ]
    return dataclasses.replace(structure, sites=tuple(sites))


def _sized(
    source: Source,
    structure: Structure,
    target: Target,
    scheme: Scheme | None,
    options: Any,
    steps: list[Step],
    dropped: dict[str, str],
) -> Plan:
    own = {name for name in source.side_files if any(fnmatchcase(name, glob) for glob in (*target.writes, *WRITES))}
    untied = {output.spec.name for step in steps for output in step.outputs if output.part == "weight"}
    untied |= {step.site.weight for step in steps if step.site and step.format}
    largest = sorted((working_set(step, source.specs) for step in steps), reverse=True)[:2]
    return Plan(
        architecture=structure.architecture,
        target=target.name,
        scheme=scheme.name if scheme else "none",
        scheme_digest=scheme.digest if scheme else "",
        options=dataclasses.asdict(options),
        sources=dict(source.specs),
        steps=tuple(steps),
        tied={alias: name for alias, name in structure.tied.items() if alias not in untied},
        untied={alias: name for alias, name in structure.tied.items() if alias in untied},
        dropped=dropped
        | {name: f"side file: {target.name} writes its own" for name in source.side_files if name in own},
        side_files=tuple(name for name in sorted(source.side_files) if name not in own),
        notes=(
            *target.notes(structure, options),
            *_smoothing_notes(scheme, steps),
            *told(source.quantized, scheme, steps),
        ),
        memory=target.base_memory + sum(largest) + held_ahead(source),
        disk=sum(step.nbytes for step in steps) + sum(_length(content) for content in source.side_files.values()),
        traced=structure.traced,
        dialect=source.dialect,
    )


def _length(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _smoothing_notes(scheme: Scheme | None, steps: list[Step]) -> tuple[str, ...]:
    experts = any(step.format and step.site and step.site.expert is not None for step in steps)
    if scheme and experts and scheme.format.prescales:
        return (f"experts are not smoothed by {scheme.format.algorithm}: they share one input, as in ModelOpt",)
    return ()


def _formats(
    structure: Structure, target: Target, scheme: Scheme | None, options: Any
) -> tuple[dict[str, Format | str], dict[str, list[str]]]:
    """Weight name -> its format, or the reason why it is kept; why the target has no such format -> the modules.

    What speaks against the KV cache is told with them: the target makes no draft then, which would tell it.
    """
    formats: dict[str, Format | str] = {}
    refused: dict[str, list[str]] = {}
    for site in structure.sites if scheme else ():
        assert scheme
        format_: Format | str = scheme.format_of(site)
        if isinstance(format_, Format):
            kept = target.keeps(format_, site)
            reason = "" if kept else target.refuse(format_, options)
            if site.stacked and not (kept or reason):
                reason = target.refuse_stack(format_, site, options)
            if reason:
                refused.setdefault(reason, []).append(site.module)
            format_ = kept or format_
        formats[site.weight] = format_
    if refused and scheme and scheme.kv and (why := target.refuse_kv(scheme.kv, structure, options)):
        refused.setdefault(why, []).append(CACHE)
    return formats, refused


def _check_formats(
    structure: Structure,
    target: Target,
    scheme: Scheme | None,
    formats: Mapping[str, Format | str],
    refused: Mapping[str, list[str]],
) -> None:
    """SchemeError where the target refuses a format, or where nothing has one."""
    if scheme is None:
        return
    if refused:
        carried = isinstance(scheme, StoredScheme)
        stacked = [name for reason, names in refused.items() if STACKED in reason for name in names]
        hint = OTHERWISE if carried else _kept_by(stacked) if stacked else ""
        what = "hold what the quantized source stores" if carried else f"express scheme {scheme.name}"
        raise SchemeError(
            _all(
                [(module, reason) for reason, modules in refused.items() for module in modules],
                f"target {target.name} cannot {what}",
            )
            + (f"\n  {hint}" if hint else "")
        )
    if not any(isinstance(format_, Format) for format_ in formats.values()) and not scheme.kv:
        raise SchemeError(
            f"scheme {scheme.name} matches no weight of {structure.architecture}: nothing would be quantized.\n"
            f"  The model has {len(structure.sites)} quantizable modules"
            + "".join(f"\n  {m}" for m in fold_layers(site.module for site in structure.sites)[:8])
        )


def _kept_by(modules: list[str]) -> str:
    """The rule of a recipe that leaves modules as they are, in all layers."""
    globs = json.dumps(list(dict.fromkeys(f"*.{'.'.join(name.split('.')[-2:])}" for name in modules)))
    return f'a recipe keeps them: [[rule]], modules = {globs}, quant = "none"'


def _all(problems: list[tuple[str, str]], where: str) -> str:
    """One message for all problems of the stage; modules that repeat with the layer are folded into one line."""
    return "\n".join([f"{where}:", *(f"  {line}" for line in fold_problems(problems))])
