"""The plan: every output tensor with its shape, dtype and expression, known before any weight is read; no framework.

A plan is a value. `make_plan` joins source, structure, scheme and target, collects everything that does not fit into
one error, and computes the bytes on disk and the peak of memory from headers alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import PlanError, SchemeError, UsageError, fold_layers
from bridge.values import Format, Numeric, Site, Structure, TensorSpec

if TYPE_CHECKING:
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source
    from bridge.targets import Target


# Files beside what the target writes; see bridge.finish and bridge.output.
CALIBRATION = "calibration.safetensors"
WRITES = ("bridge.json", CALIBRATION, "report.json", "report.html", "journal.jsonl")


@dataclass(frozen=True)
class Output:
    """One tensor to write: what part of its step it is, and the expression that makes it.

    `part`: "weight" (codes, or the plain tensor), "scale", "scale_2", "input_scale", "pre_quant_scale", "k_scale",
    "v_scale".
    """

    spec: TensorSpec
    part: str
    expression: str


@dataclass(frozen=True)
class Step:
    """Makes the outputs of one source tensor (or of an attention module's KV statistics, where `source` is empty).

    `format` is None for a tensor that is carried over; `kept` says why. `transpose` turns `[out, in]` into `[in, out]`.
    `attention` names the module whose K and V scales the step writes.
    """

    source: str
    outputs: tuple[Output, ...]
    site: Site | None = None
    format: Format | None = None
    kept: str = ""
    transpose: bool = False
    attention: str = ""

    @property
    def nbytes(self) -> int:
        return sum(output.spec.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Plan:
    """Everything a conversion will do. `memory` and `disk` are bytes; `dropped` maps source tensors to the reason.

    >>> import bridge
    >>> plan = bridge.plan("examples/models/tiny-llama", target="trt", quant="fp8")
    >>> plan.steps[1].outputs[0].spec.dtype
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
    dropped: dict[str, str] = field(default_factory=dict)
    side_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    memory: int = 0
    disk: int = 0
    traced: bool = False

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(output for step in self.steps for output in step.outputs)

    @property
    def quantized(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.format)

    @property
    def digest(self) -> str:
        """sha256 of all that decides the written bytes; equal plans on equal inputs write equal files."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, the inverse of `plan_from_dict`."""
        return _plain(self)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Dataclasses, mappings and tuples as JSON has them; `dataclasses.asdict` copies every leaf, far slower."""
    if dataclasses.is_dataclass(value):
        return {key: _plain(item) for key, item in vars(value).items()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """Rebuild a plan from `Plan.to_dict`, as read back from a written model's manifest."""

    def spec(d: Mapping[str, Any]) -> TensorSpec:
        return TensorSpec(d["name"], tuple(d["shape"]), d["dtype"])

    def numeric(d: Mapping[str, Any]) -> Numeric:
        return Numeric(**{**d, "block": tuple(d["block"])})

    def step(d: Mapping[str, Any]) -> Step:
        f, s = d["format"], d["site"]
        return Step(
            source=d["source"],
            outputs=tuple(Output(spec(o["spec"]), o["part"], o["expression"]) for o in d["outputs"]),
            site=Site(**{**s, "roles": tuple(s["roles"])}) if s else None,
            format=_format_from_dict(f, numeric) if f else None,
            **{key: d[key] for key in ("kept", "transpose", "attention")},
        )

    plain = {f.name: data[f.name] for f in dataclasses.fields(Plan) if f.name not in ("sources", "steps")}
    for name in ("side_files", "notes"):
        plain[name] = tuple(plain[name])
    return Plan(
        **plain,
        sources={name: spec(d) for name, d in data["sources"].items()},
        steps=tuple(step(d) for d in data["steps"]),
    )


def _format_from_dict(data: Mapping[str, Any], numeric: Any) -> Format:
    fields = dict(data)
    fields["weight"] = tuple(numeric(n) for n in data["weight"])
    fields["input"] = numeric(data["input"]) if data["input"] else None
    return Format(**fields)


def make_plan(source: Source, structure: Structure, target: Target, scheme: Scheme | None, options: Any) -> Plan:
    """Plan the conversion of `source` to `target`; PlanError or SchemeError lists everything that does not fit.

    Args:
        structure: from `bridge.tables.structure` or, for an architecture without a table, `bridge.trace`.
        scheme: bound to the structure's sites (`Scheme.bound`); None converts without quantizing.
        options: an instance of `target.Options`.
    """
    structure = _own_heads(structure)
    formats = _formats(structure, target, scheme, options)
    by_weight = {site.weight: site for site in structure.sites}
    problems: list[str] = []
    steps: list[Step] = []
    untold = {name: why for name, why in source.dropped.items() if name not in structure.tied}
    dropped = {**untold, **structure.ignored}
    for name, spec in source.specs.items():
        if name in structure.tied or name in dropped:
            continue
        reason = target.drop(name, structure, options)
        if reason:
            dropped[name] = reason
            continue
        site = by_weight.get(name)
        steps.append(_step(name, spec, site, formats, structure, target, options, problems))
    for site in structure.sites:  # a head that is tied to the embedding becomes a tensor of its own once quantized
        if site.weight in structure.tied and isinstance(formats.get(site.weight), Format):
            canonical = source.specs[structure.tied[site.weight]]
            steps.append(_step(canonical.name, canonical, site, formats, structure, target, options, problems))
    if scheme and scheme.kv:
        problems += [reason for reason in [target.refuse_kv(scheme.kv, structure)] if reason]
        steps += [target.kv_step(module, scheme.kv) for module in structure.attention]
    if problems:
        raise PlanError(_all(problems, f"{structure.architecture} to {target.name}, scheme {scheme and scheme.name}"))
    return _sized(source, structure, target, scheme, options, steps, dropped)


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
    own = {*target.writes, *WRITES}
    untied = {step.site.weight for step in steps if step.site and step.format}
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
        dropped=dropped
        | {name: f"side file: {target.name} writes its own" for name in source.side_files if name in own},
        side_files=tuple(name for name in sorted(source.side_files) if name not in own),
        notes=(*target.notes(structure, options), *_smoothing_notes(scheme, steps)),
        memory=target.base_memory + sum(largest),
        disk=sum(step.nbytes for step in steps) + sum(_length(content) for content in source.side_files.values()),
        traced=structure.traced,
    )


def _length(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _smoothing_notes(scheme: Scheme | None, steps: list[Step]) -> tuple[str, ...]:
    experts = any(step.format and step.site and step.site.expert is not None for step in steps)
    if scheme and experts and scheme.format.prescales:
        return (f"experts are not smoothed by {scheme.format.algorithm}: they share one input, as in ModelOpt",)
    return ()


def working_set(step: Step, sources: Mapping[str, TensorSpec]) -> int:
    """Bytes in memory while the step runs: the source (twice if smoothed, or beside a peer) and the outputs."""
    read = sources[step.source].nbytes if step.source else 0
    twice = step.format is not None and (step.format.prescales or bool(step.site and step.site.shares))
    return read * (2 if twice else 1) + step.nbytes


def stream_memory(plan: Plan, memory: int | None) -> int:
    """Bytes that running steps may use together; UsageError where `memory` does not hold even the largest step."""
    base = plan.memory - sum(sorted((working_set(step, plan.sources) for step in plan.steps), reverse=True)[:2])
    largest = max((working_set(step, plan.sources) for step in plan.steps), default=0)
    if memory is not None and memory < base + largest:
        raise UsageError(
            f"memory={memory / 1e9:.2f} GB is too little: the target needs {base / 1e9:.2f} GB and the largest tensor "
            f"{largest / 1e9:.2f} GB while it is converted; give at least {(base + largest) / 1e9:.2f} GB"
        )
    return (memory or plan.memory) - base


def _formats(structure: Structure, target: Target, scheme: Scheme | None, options: Any) -> dict[str, Format | str]:
    """Weight name -> its format, or the reason why it is kept."""
    if scheme is None:
        return {}
    formats: dict[str, Format | str] = {}
    refused: dict[str, list[str]] = {}
    for site in structure.sites:
        format_: Format | str = scheme.format_of(site)
        if isinstance(format_, Format):
            kept = target.keeps(format_, site)
            reason = "" if kept else target.refuse(format_, options)
            if reason:
                refused.setdefault(reason, []).append(site.module)
            format_ = kept or format_
        formats[site.weight] = format_
    if refused:
        raise SchemeError(
            _all(
                [f"{', '.join(fold_layers(modules))}: {reason}" for reason, modules in refused.items()],
                f"target {target.name} cannot express scheme {scheme.name}",
            )
        )
    if not any(isinstance(format_, Format) for format_ in formats.values()) and not scheme.kv:
        raise SchemeError(
            f"scheme {scheme.name} matches no weight of {structure.architecture}: nothing would be quantized.\n"
            f"  The model has {len(structure.sites)} quantizable modules"
            + "".join(f"\n  {m}" for m in fold_layers(site.module for site in structure.sites)[:8])
        )
    return formats


def _step(
    name: str,
    spec: TensorSpec,
    site: Site | None,
    formats: Mapping[str, Format | str],
    structure: Structure,
    target: Target,
    options: Any,
    problems: list[str],
) -> Step:
    format_ = formats.get(site.weight) if site else None
    if site and isinstance(format_, Format):
        problems += [f"{site.module}: {problem}" for problem in target.misfits(format_, site, spec)]
        return target.quantized_step(spec, site, format_, options)
    kept = format_ if isinstance(format_, str) else _why_plain(name, structure)
    return target.plain_step(spec, site, kept, options)


def _why_plain(name: str, structure: Structure) -> str:
    roles = structure.roles.get(name, ())
    return roles[0].rsplit(".", 1)[0] + ": not a matrix multiplication" if roles else "not a matrix multiplication"


def _all(problems: list[str], where: str) -> str:
    """One message for all problems of the stage; modules that repeat with the layer are folded into one line."""
    by_text: dict[str, list[str]] = {}
    for problem in problems:
        module, _, text = problem.partition(": ")
        by_text.setdefault(text or module, []).append(module if text else "")
    lines = [
        f"  {', '.join(fold_layers(m for m in modules if m))}{': ' if any(modules) else ''}{text}"
        for text, modules in by_text.items()
    ]
    return "\n".join([f"{where}:", *lines])
