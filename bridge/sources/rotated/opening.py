"""Rotate an opened model, or say why that is not exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.core.dtypes import FLOATS
from bridge.core.errors import PlanError, UsageError
from bridge.core.text import fold_layers, grouped, natural, nearest
from bridge.core.values import TensorSpec
from bridge.sources.source import Source
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.match import Matched, architecture_of
from bridge.tables.architectures.structure import match_table

# word -> whether the residual stream is rotated, and the values of heads
ROTATIONS = {"hadamard": (True, True), "hadamard:stream": (True, False), "hadamard:heads": (False, True)}


def rotated(source: Source, rotation: str | None) -> Source:
    """`source` with a rotation folded into its weights; PlanError with every reason why its outputs would change."""
    if rotation is None or rotation == source.rotation:
        return source
    if rotation not in ROTATIONS:
        raise UsageError(f"rotate={rotation!r} (--rotate): unknown; {nearest(rotation, ROTATIONS)}")
    from bridge.sources.rotated.source import RotatedSource  # with numpy, which a plan without a rotation loads not
    from bridge.tables.architectures.rotation import turns_of

    if why := _why_not(source):
        raise _refused(source, [why])
    matched = match_table(source.config, source.specs)
    stream, heads = ROTATIONS[rotation]
    config, origins, problems = _untied(matched, source) if stream else (source.config, {}, [])
    ignored = matched.ignored if stream else {}  # with heads alone, draft layers read what they read before
    specs = {name: spec for name, spec in source.specs.items() if name not in ignored}
    specs |= {name: replace(specs[stored], name=name) for name, stored in origins.items()}
    if not problems:
        matched = match_table(config, specs)
    turns = turns_of(matched, stream, heads)
    for why, names in _by_reason(turns.problems):
        problems.append(f"{', '.join(fold_layers(names))}: {why}")
    problems += _unrounded({name: specs[name] for name in turns.tensors})
    if problems:
        possible = stream and not turns_of(match_table(source.config, source.specs), False, True).problems
        raise _refused(source, problems, "take rotate='hadamard:heads' (--rotate hadamard:heads)" if possible else "")
    ordered = dict(sorted(specs.items(), key=lambda item: natural(item[0])))
    return RotatedSource(source, rotation, turns, config, origins, ordered, ignored)


def _why_not(source: Source) -> str:
    """Why a source is not rotated, whatever its tensors are; "" for one that may be."""
    if source.rotation:
        return f"it is rotated already ({source.rotation})"
    if source.quantized:
        return 'it is quantized, and codes are not rotated; convert it with quant="none" first, and rotate that'
    if source.sparse:
        return "its 2:4 zeros would be filled; rotate the whole model"
    if source.adapter_is_copied:
        return "the adapter beside it reads the model as it was; merge it: adapter='merge' (--adapter merge)"
    if load_arch(architecture_of(source.config)) is None:
        return (
            f"no file of mappings/arch lists {architecture_of(source.config)}, and only a table says which matrices "
            "read the residual stream"
        )
    return ""


def _untied(matched: Matched, source: Source) -> tuple[Mapping[str, Any], dict[str, str], list[str]]:
    """The config of the model with a head of its own, what that is made of, and why it cannot have one."""
    if not matched.tied:
        return source.config, {}, []
    table, config = matched.table, dict(source.config)
    for tie in table.ties:
        for word in tie.when.names & table.config.keys() if tie.when.value(matched.names) else ():
            config[word] = False
    names = table.names(config)
    left = [tie.alias for tie in table.ties if tie.when.value(names)]
    problems = [f"{alias} is tied to the embedding whatever the config says" for alias in left]
    return config, dict(matched.tied), problems


def _unrounded(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Tensors that change, of dtypes that a rotation does not take."""
    wrong = [name for name, spec in specs.items() if spec.dtype not in (*FLOATS, "float64")]
    return [f"{', '.join(fold_layers(wrong))}: {specs[wrong[0]].dtype} cannot be rotated"] if wrong else []


def _by_reason(problems: tuple[tuple[str, str], ...]) -> list[tuple[str, list[str]]]:
    return [(group[0][1], [name for name, _ in group]) for group in grouped(problems, lambda problem: problem[1])]


def _refused(source: Source, problems: list[str], instead: str = "") -> PlanError:
    """One error for all problems."""
    remedy = instead or "leave rotate= (--rotate) out"
    return PlanError("\n  ".join([f"{source.where} cannot be rotated exactly; {remedy}", *problems]))
