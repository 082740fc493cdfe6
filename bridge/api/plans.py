"""The verb `plan`, and plans from the words of a user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from bridge.api.advice import bits_of, recommended
from bridge.api.words import KvName, RotationName, SchemeName, TargetName, TargetOptions
from bridge.core.errors import BridgeError, PlanError, SchemeError, SourceError, UsageError
from bridge.core.machine import without_collection
from bridge.core.text import byte_count, number
from bridge.core.values import EITHER, Structure, main_dtype
from bridge.planning.contract_files import load_runtime, runtimes
from bridge.planning.contracts import FUSED, verdict
from bridge.planning.make import PlanInputs, check_weights, incompatibilities, make_plan
from bridge.planning.memory import process_memory, stream_memory
from bridge.planning.passthrough import passthrough_scheme
from bridge.planning.plan import Plan
from bridge.planning.programs import Contract, Runtime, flag
from bridge.planning.registries import leave_plain, why_too_old
from bridge.planning.structure import structure_of
from bridge.quant.schemes.catalog import layout_of
from bridge.quant.schemes.group_size import check_blocks, with_dividing_blocks, with_group, with_zero_points
from bridge.quant.schemes.load import check_name, load_scheme
from bridge.quant.schemes.recipe import layout_asked
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.configs.positions import vocabulary_size
from bridge.sources.opening import open_source
from bridge.sources.rotated.opening import rotated
from bridge.sources.source import Source
from bridge.targets import load_target, make_options, program_of, target_names
from bridge.targets.hf.spelling import SPELLINGS

MOST_HINTS = 3  # schemes that a refusal names

if TYPE_CHECKING:
    from bridge.calibration.data import Sampling
    from bridge.calibration.walk.budget import Need
    from bridge.sources.pruned.kept import Kept
    from bridge.sources.pruned.sparse import Sparse


def plan(
    model: Any,
    target: TargetName | str,
    quant: SchemeName | str | Path | Scheme | None = None,
    *,
    kv: KvName | str | None = None,
    group: int | None = None,
    zero_points: bool = False,
    config: Mapping[str, Any] | str | Path | None = None,
    runtime: str | None = None,
    memory: int | str | None = None,
    keep: Mapping[str, int | str] | None = None,
    drop_layers: Sequence[int] | None = None,
    sparse: str | None = None,
    base: Any = None,
    adapter: str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    candidates: str | Sequence[str] | None = None,
    rotate: RotationName | str | None = None,
    **options: Unpack[TargetOptions],
) -> Plan:
    """Plan a conversion from headers alone: every output tensor, what stays unquantized and why, memory, disk.

    Takes the same arguments as `convert`. Reads no weight, and loads no framework if the architecture has a table. With
    `memory` it says whether a calibration takes the whole model at once or block by block, and refuses what writing
    does not fit into; with `keep`, `drop_layers` or `sparse` what `prune` would write; with `out` it refuses an output
    that `convert` may not write, and changes nothing there. Of "int4:best" it names the rules that would be measured.

    Raises:
        BridgeError: UsageError, SourceError, SchemeError or PlanError; each lists all problems at once. WriteError: of
            `out`.

    >>> plan = bridge.plan("examples/models/tiny-llama", target="hf", quant="int8_wo")
    >>> len(plan.outputs), plan.disk < 3_000_000  # bytes
    (83, True)
    """
    if out is not None:
        from bridge.core.remote.upload import check_output

        check_output(out, overwrite)
    check_name(quant)
    source = rotated(open_source(model, config, base=base, adapter=adapter), rotate)
    if sparse is not None:
        from bridge.sources.pruned.opening import plan_sparse
        from bridge.sources.pruned.sparse import METHODS, check_sparse

        check_sparse(sparse, METHODS[0], keep is not None or drop_layers is not None)
        cut, zeros = plan_sparse(source, METHODS[0])
        source = cut.pruned({}, sparse=zeros)
    elif keep is not None or drop_layers is not None:
        from bridge.sources.pruned.opening import plan_cut

        source = plan_cut(source, keep, drop_layers).outline()
    structure = structure_of(source)

    def planned(one: Scheme | None) -> Plan:
        return plan_of(source, structure, target, one, dict(options), runtime)

    with planned_hints(source, structure, target, (quant, kv), dict(options), runtime):
        scheme, made = _plan_of_words(source, structure, planned, quant, kv, candidates, (group, zero_points))
    if memory is None:
        return made
    limit = byte_count(memory, "memory=")
    stream_memory(made, limit)
    if scheme is None or not made.calibration:
        return made
    from bridge.calibration.walk.budget import choice

    return replace(made, calibration=choice(need_of(source, structure, scheme), limit))


def _plan_of_words(
    source: Source, structure: Structure, planned: Callable[[Scheme | None], Plan], quant: Any, kv: str | None,
    candidates: str | Sequence[str] | None, blocks: tuple[int | None, bool],
) -> tuple[Scheme | None, Plan]:  # fmt: skip
    """The scheme and the plan of what a user named; of `int4:best` those of the rule that needs most."""
    from bridge.api.best.candidates import candidates_of, check_unused

    if layout_asked(quant) is None:
        check_unused(candidates, quant)
        scheme = scheme_of(quant, kv, structure, source, blocks) or passthrough_of(quant, source)
        return scheme, planned(scheme)
    found = candidates_of(quant, kv, structure, source, planned, candidates, blocks)
    from bridge.calibration.walk.budget import default_tokens

    scheme = found.rules[0].scheme
    tokens = default_tokens(scheme, source.config)
    return scheme, found.planned(source, structure, (tokens.calibrated, tokens.held_out))


def scheme_of(
    quant: Any, kv: str | None, structure: Structure, source: Source, blocks: tuple[int | None, bool] = (None, False)
) -> Scheme | None:
    """The scheme that a user named, or None; SchemeError if one of its rules matches nothing in the model.

    blocks: their size, None for the scheme's own, and whether they have zero points.
    A scheme by name, in a recipe too, has blocks that divide the model's matrices; a user's own has those that it says.
    """
    group, zero_points = blocks
    check_blocks(group, zero_points)
    if quant is None or quant == "none":
        given = (("kv", kv, "fp8"), ("group", group, "int4_wo"), ("zero_points", zero_points, "int4_wo"))
        for name, value, example in given:
            if value:
                raise UsageError(f"{name}={value!r} needs a scheme too; pass quant={example!r}, for example")
        return None
    scheme = with_zero_points(with_group(load_scheme(quant, kv=kv), group), zero_points).bound(structure.sites)
    own = isinstance(quant, Scheme) and not scheme.rules
    return scheme if own else with_dividing_blocks(scheme, structure, source.specs)


def passthrough_of(quant: Any, source: Source) -> Scheme | None:
    """The scheme that copies the codes of a quantized source; None if `quant` asks for anything else."""
    return passthrough_scheme(source.quantized) if quant is None and source.quantized else None


@without_collection()
def plan_of(
    source: Source,
    structure: Structure,
    target: str,
    scheme: Scheme | None,
    options: dict[str, Any],
    runtime: str | None = None,
) -> Plan:
    """Plan a conversion; UsageError, PlanError or SchemeError if it is impossible.

    `runtime`, or a target that is the name of a program: of the outputs that it loads, the first that can be written.
    """
    program, contracts = contracts_of(target, options, runtime)
    if program is None:
        inputs = _plan_inputs(source, structure, target, scheme, options)
        plan = make_plan(inputs)
        if chosen := _chosen_format(plan, options):
            plan = replace(plan, notes=(*plan.notes, chosen))
        return _checked(plan, inputs)
    structure = leave_plain(structure, program.name, program.title)
    refused: dict[str, list[str]] = {}
    partial: Plan | None = None
    for contract in contracts:
        if scheme and (why := contract.lacks(scheme.formats, structure.architecture)):
            # of several outputs, the remedy of one may be another that is refused too
            why = (len(contracts) == 1 and _why_unsupported(contract, scheme, options)) or why
            refused.setdefault(why, []).append(contract.flags(contract.target))
            continue
        half = _dtype_for(contract, source, options)
        given = {**contract.options, **options, **half}
        inputs = _plan_inputs(source, structure, contract.target, scheme, given)
        inputs = replace(inputs, positive=bool(scheme and not contract.reads_negative(scheme)))
        try:
            plan = _checked(make_plan(inputs), inputs)
        except (PlanError, SchemeError) as error:
            if len(contracts) == 1:
                raise
            refused.setdefault(str(error), []).append(contract.flags(contract.target))
            continue
        answer = verdict(program, plan)
        if not answer.why_not:
            rounds = f", which rounds inputs to {answer.inputs}" if answer.inputs else ""
            chosen = f", float32 as {half['dtype']} (--dtype)" if half else ""
            notes = (*plan.notes, f"for {program.title}{rounds}: {contract.flags()}{chosen}")
            plan = replace(plan, notes=notes, program=program.name)
            if not (scheme and _leaves_experts(plan)):
                return plan
            partial = partial or plan
            continue
        refused.setdefault(answer.why_not, []).append(contract.flags(contract.target))
    if partial:
        return partial
    if not refused:
        raise SchemeError(_not_loaded(program, target, options))
    raise SchemeError(_refusal(program, scheme, structure.architecture, contracts, refused))


@contextmanager
def planned_hints(
    source: Source, structure: Structure, target: str, quant: tuple[Any, str | None], options: dict[str, Any],
    runtime: str | None,
) -> Iterator[None]:  # fmt: skip
    """Add to a refusal for a program what it loads of this model instead: schemes that were planned for it.

    quant: the scheme and the KV cache that were asked for.
    """
    asked, kv = quant[0] if isinstance(quant[0], str) and not quant[0].endswith(".toml") else None, quant[1]
    asked = None if asked == "none" else asked
    try:
        yield
    except (PlanError, SchemeError) as error:
        program, contracts = contracts_of(target, options, runtime)
        wanted = bits_of(load_scheme(asked)) if asked and layout_of(asked) is None else 4
        names = sorted(recommended(program), key=lambda n: bits_of(load_scheme(n)) != wanted) if contracts else []
        fits: list[str] = []
        for name in names if asked else ():
            try:
                plan_of(source, structure, target, scheme_of(name, kv, structure, source), options, runtime)
            except BridgeError:
                continue
            fits.append(name)
        if not fits:
            raise
        raise type(error)(f"{error}\n  planned for this model: --quant {', '.join(fits[:MOST_HINTS])}") from error


def _chosen_format(plan: Plan, options: Mapping[str, Any]) -> str:
    """A sentence on a format of target hf that nobody asked for and that is not the usual one; "" otherwise."""
    formats = [*SPELLINGS] if plan.target == "hf" and options.get("format") is None else []
    if not formats or plan.options["format"] == formats[0]:
        return ""
    either = any(n.search == EITHER for step in plan.quantized if step.format for n in step.format.weight)
    target = load_target(plan.target)
    usual = make_options(target, {"format": formats[0]})
    held = not any(target.why_unsupported(step.format, usual) for step in plan.quantized if step.format)
    why = f"does not hold the codes of scheme {plan.scheme}"
    why = "keeps scales positive" if either else "of these codes is loaded by no program" if held else why
    return f"format {plan.options['format']} (--format): {formats[0]} {why}"


def _dtype_for(contract: Contract, source: Source, options: Mapping[str, Any]) -> dict[str, str]:
    """The dtype in which a program is given a float32 source, if nobody chose one."""
    asked = contract.float32_as and options.get("dtype") is None
    return {"dtype": contract.float32_as} if asked and main_dtype(source.specs.values()) == "float32" else {}


def _leaves_experts(plan: Plan) -> bool:
    """Whether experts in one tensor stay unquantized, which another output may quantize."""
    return any(step.site and step.site.stacked and not step.format for step in plan.steps)


def contracts_of(target: str, options: Mapping[str, Any], runtime: str | None) -> tuple[Runtime | None, list[Contract]]:
    """The program that `runtime` or `target` names, None if neither does, and its contracts for these options."""
    named = program_of(target)
    program = named if runtime is None else load_runtime(runtime)
    if named and program is not named:
        raise UsageError(f"target {target!r} and runtime {runtime!r} (--for) are two programs; leave one out")
    if program is None:
        return None, []
    written = None if named else load_target(target).name
    contracts = [contract for contract in program.contracts if written in (None, contract.target)]
    return program, [
        c for c in contracts if all(options.get(name, value) == value for name, value in c.options.items())
    ]


def _checked(plan: Plan, inputs: PlanInputs) -> Plan:
    """Add notes on the source; make the keys of files, so that a tokenizer without a place in them is refused now."""
    if kept := inputs.source.kept:
        plan = replace(plan, notes=(*plan.notes, *_pruning_notes(kept, inputs.source.sparse, plan)))
    if inputs.source.note:
        plan = replace(plan, notes=(*plan.notes, inputs.source.note))
    _check_kept(inputs.source, plan)
    load_target(plan.target).file_metadata(plan, inputs.source)
    calibrates = inputs.scheme is not None and inputs.scheme.needs_calibration
    if inputs.source.can_run and (calibrates or load_target(plan.target).runs):
        weights = 2 * sum(spec.nbytes for spec in inputs.source.specs.values())  # as stored, and the runtime's copy
        running = process_memory(weights, vocabulary_size(inputs.source.config) or 0)
        plan = replace(plan, running=running)
    if not calibrates:
        return plan
    if why := why_too_old(inputs.source.config):
        raise SourceError(f"{inputs.source.where}: {why}")
    assert inputs.scheme
    return replace(plan, calibration=need_of(inputs.source, inputs.structure, inputs.scheme).line())


def _pruning_notes(kept: Kept, sparse: Sparse | None, plan: Plan) -> Iterator[str]:
    """What was cut; of zeros, which programs are faster with them: files keep every zero."""
    if changed := kept.lines():
        yield f"pruned: {', '.join(changed)}"
    if sparse:
        faster = [
            f"{program.title} ({contract.sparse.option})"
            for program in runtimes()
            if (contract := program.contract_of(plan)) and contract.sparse
        ]
        count = number(len(sparse.axes), "matrix", "matrices")
        yield (
            f"sparse: 2:4 in {count}; files keep their size, and "
            + (f"{', '.join(faster)} can be faster" if faster else "no program that a contract is about is faster")
        )


def _check_kept(source: Source, plan: Plan) -> None:
    """PlanError if an adapter beside this output would not be applied as it was trained."""
    if not source.adapter_is_copied:
        return
    remedy = "merge it: adapter='merge' (--adapter merge)"
    if plan.target != "hf":
        raise PlanError(f"target {plan.target} has no place for an adapter beside it, target hf has; {remedy}")
    if any(step.format and step.format.prescales for step in plan.quantized):
        raise PlanError(
            f"scheme {plan.scheme} scales the inputs of layers, part of it in the norms before them, and an adapter "
            f"beside it would read scaled inputs; {remedy}, or use a scheme without pre-scales, such as fp8 or int4_wo"
        )


def need_of(source: Source, structure: Structure, scheme: Scheme, sampling: Sampling | None = None) -> Need:
    """What a calibration with rows of the embedded text takes of memory."""
    from bridge.calibration.data import DEFAULT
    from bridge.calibration.walk.budget import calibration_need, default_tokens

    tokens = default_tokens(scheme, source.config, sampling or DEFAULT)
    return calibration_need(source.specs, source.config, scheme, tokens, structure.sites)


def _why_unsupported(contract: Contract, scheme: Scheme, options: Mapping[str, Any]) -> str:
    """Why a contract's target does not write a scheme, with the nearest that it writes; "" if it does."""
    chosen = load_target(contract.target)
    given = make_options(chosen, {**contract.options, **options}, _arguments)
    return next(filter(None, (chosen.why_unsupported(format_, given) for format_ in scheme.formats)), "")


def _not_loaded(program: Runtime, target: str, options: Mapping[str, Any]) -> str:
    """What a program loads instead of a target with these options."""
    given = " ".join([f"--target {target}", *(flag(name.replace("_", "-"), value) for name, value in options.items())])
    what = f"{program.title} does not load {given}; it loads " + "; ".join(c.flags() for c in program.contracts)
    return "\n  ".join([what, *_older(program)])


def _refusal(
    program: Runtime,
    scheme: Scheme | None,
    architecture: str,
    contracts: Sequence[Contract],
    refused: Mapping[str, Sequence[str]],
) -> str:
    """What a program loads instead, if no output that it loads can be written."""
    what = f"{program.title} loads no {f'output of scheme {scheme.name}' if scheme else 'unquantized output'} here"
    lines = [f"{', '.join(flags)}: {why}".replace("\n", "\n    ") for why, flags in refused.items()]
    excluded = [contract for contract in program.contracts if contract not in contracts]
    instead = [c.flags() for c in excluded if scheme and not c.lacks(scheme.formats, architecture)]
    lines += [f"this scheme it loads from {'; or from '.join(instead)}"] if instead else []
    if scheme and all(contract.lacks(scheme.formats, architecture) for contract in contracts):
        lines.append(f"`qbridge show schemes --for {program.name} --all` has those that it loads of some model")
    if any(FUSED in reason for reason in refused):
        lines.append(
            "a recipe keeps these matrices, and those that are fused with them, unquantized "
            '(modules = ["*.NAME"], quant = "none"); fp8_pc_pt and int8_wo have no blocks of rows'
        )
    lines += _older(program)
    return "\n  ".join([what + ":", *lines])


def _older(program: Runtime) -> list[str]:
    """A line on the target that has the name of the program and is for older versions of it."""
    if program.name not in target_names() or any(c.target == program.name for c in program.contracts):
        return []
    others = "; ".join(f"{other.name} {other.versions}" for other in load_target(program.name).loaded_by)
    return [f"--target {program.name} without --for writes another format, for {others}"]


def incompatibilities_of(
    source: Source, structure: Structure, target: str, scheme: Scheme, options: Mapping[str, Any] | None = None
) -> list[tuple[str, str]]:
    """What a plan would refuse; see `bridge.planning.make.incompatibilities`."""
    return incompatibilities(_plan_inputs(source, structure, target, scheme, dict(options or {})))


def _plan_inputs(
    source: Source, structure: Structure, target: str, scheme: Scheme | None, options: dict[str, Any]
) -> PlanInputs:
    """The inputs of a plan, with the target's options resolved for this model."""
    chosen = load_target(target)
    check_weights(source.specs, structure, scheme)
    resolved = chosen.resolve(make_options(chosen, options, _arguments), structure, scheme, source.specs)
    return PlanInputs(source, structure, chosen, scheme, resolved)


def _arguments() -> list[str]:
    """The arguments of `convert`."""
    from inspect import signature

    from bridge.api.verbs import convert

    return [*signature(convert).parameters]
