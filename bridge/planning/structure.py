"""The structure of a model: from tables, or from a trace."""

from __future__ import annotations

from bridge.core.machine import without_collection
from bridge.core.values import Structure
from bridge.core.version import loads_transformers
from bridge.planning import trace_cache
from bridge.sources.source import Source
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.match import architecture_of
from bridge.tables.architectures.structure import structure


@without_collection()
def structure_of(source: Source) -> Structure:
    """From the architecture's table; if there is none, traced with torch, once."""
    if load_arch(architecture_of(source.config)) is not None:
        return structure(source.config, source.specs)
    kept = trace_cache.load(source)
    if kept is None:
        loads_transformers()
        from bridge.planning.trace import trace_structure

        kept = trace_structure(source)
        trace_cache.store(source, kept)
    return kept
