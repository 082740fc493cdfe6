"""What every verb is told, made into values: model to source, its structure, scheme, plan, data. Reads no weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, UsageError
from bridge.remote.address import check_here

if TYPE_CHECKING:
    from bridge.planning import Plan
    from bridge.quant.data import Data
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source
    from bridge.targets import Target
    from bridge.values import Structure


def open_model(model: Any, config: Mapping[str, Any] | str | Path | None, tokenizer: Any) -> Source:
    """Anything that a user may call a model."""
    from bridge.sources import open_source

    return open_source(model, config=config, tokenizer=tokenizer)


def scheme_of(quant: Any, kv: str | None, structure: Structure) -> Scheme | None:
    """The scheme that a user named, None for none; SchemeError where its rules fit nothing of the model."""
    from bridge.quant.scheme import load_scheme

    if quant is None or quant == "none":
        if kv:
            raise UsageError(f"kv={kv!r} needs a scheme beside it: quant='fp8', say")
        return None
    return load_scheme(quant, kv=kv).bound(structure.sites)


def stored_of(quant: Any, source: Source) -> Scheme | None:
    """What a quantized source is carried over as, where no other scheme and no dequantizing is asked for."""
    if quant is not None or not source.quantized:
        return None
    from bridge.quant.stored import stored_scheme

    return stored_scheme(source.quantized)


def structure_of(source: Source) -> Structure:
    """From the architecture's table; traced with torch where nobody wrote one, once."""
    from bridge.tables.match import architecture_of
    from bridge.tables.structure import load_arch, structure

    if load_arch(architecture_of(source.config)) is not None:
        return structure(source.config, source.specs)
    from bridge.recall import recall, remember

    kept = recall(source)
    if kept is None:
        from bridge.trace import trace_structure

        kept = trace_structure(source)
        remember(source, kept)
    return kept


def plan_of(source: Source, structure: Structure, target: str, scheme: Scheme | None, options: dict[str, Any]) -> Plan:
    """The plan of a conversion; UsageError, PlanError or SchemeError where it cannot be."""
    from bridge.planning import make_plan

    chosen, resolved = _resolved(source, structure, target, scheme, options)
    return make_plan(source, structure, chosen, scheme, resolved)


def misfits_of(source: Source, structure: Structure, target: str, scheme: Scheme) -> list[tuple[str, str]]:
    """What a plan without options would refuse, see `bridge.planning.misfits`."""
    from bridge.planning import misfits

    chosen, resolved = _resolved(source, structure, target, scheme, {})
    return misfits(source, structure, chosen, scheme, resolved)


def _resolved(
    source: Source, structure: Structure, target: str, scheme: Scheme | None, options: dict[str, Any]
) -> tuple[Target, Any]:
    """The target, and its options as this model needs them."""
    from bridge.targets import load_target, make_options

    chosen = load_target(target)
    return chosen, chosen.resolve(make_options(chosen, options), structure, scheme, source.specs)


def data_of(source: Source, data: Any, samples: int | None, sequence: int | None, asked: bool = True) -> Data:
    """Prepare data; where they would only serve the comparison at the end, what is wrong with them waits until then."""
    from bridge.quant.data import Data, prepare

    check_here(data=data)
    try:
        return prepare(data, source, samples=samples, sequence=sequence)
    except BridgeError as error:
        if asked:
            raise
        return Data((), (), "", 0, 0, missing=str(error))
