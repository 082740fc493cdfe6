"""The structure of a model: from tables, or from a cached trace.

Tracing imports torch and takes seconds. A cached structure is used only if the same code traced it for the same config
and tensors, and neither read nor stored where the code of models may have been patched. A cache never fails a plan.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

from bridge.core.errors import PlanError, SourceError
from bridge.core.machine import without_collection
from bridge.core.output import cache
from bridge.core.output.provenance import provenance
from bridge.core.parsing.typed_json import typed
from bridge.core.ranges import check_versions
from bridge.core.records import plain
from bridge.core.values import Structure
from bridge.core.version import install, loads_transformers
from bridge.planning.eagle import eagle_structure, is_eagle
from bridge.planning.registries import why_too_old
from bridge.sources.configs.diffusion import is_diffusion
from bridge.sources.live_models.as_installed import is_as_installed
from bridge.sources.source import Source
from bridge.tables.architectures.by_table import structure_by_table
from bridge.tables.architectures.match import architecture_of
from bridge.tables.architectures.meaning import without_origin

KIND = "structures"  # of the cache's entries
PACKAGES = ("torch", "transformers")


@without_collection()
def structure_of(source: Source) -> Structure:
    """Return the structure by the architecture's table; without a table it is traced with torch, once.

    EAGLE-3's drafts have neither a table nor a class: their names say it.
    """
    if found := structure_by_table(source.config, source.specs):
        return found
    if is_eagle(source.config):
        return eagle_structure(source.config, source.specs, source.read)
    structure_ = load_traced(source)
    if structure_ is None:
        _check_packages(source)
        check_versions("trt")
        if why := why_too_old(source.config):
            raise SourceError(f"{source.where}: {why}")
        loads_transformers()
        from bridge.planning.trace import trace_structure

        structure_ = trace_structure(source)
        store_traced(source, structure_)
    return structure_


def traces(source: Source) -> bool:
    """Whether `structure_of` will import torch."""
    known = structure_by_table(source.config, source.specs) or is_eagle(source.config) or load_traced(source)
    return not known


def _check_packages(source: Source) -> None:
    """PlanError if a package is absent that tracing needs."""
    absent = [name for name in _packages(source) if find_spec(name) is None]
    if absent:
        extra = "diffusers" if absent == ["diffusers"] else "trt"
        name, are = architecture_of(source.config), "is" if len(absent) == 1 else "are"
        raise PlanError(
            f"{source.where}: {name} has no table, so that its structure is read off its class, and "
            f"{' and '.join(absent)} {are} not installed: {install(extra)}"
        )


def load_traced(source: Source) -> Structure | None:
    """The structure of an equal source that was traced before; None if there is no usable entry."""
    if not _may_be_kept(source):
        return None
    body = cache.load(KIND, _key(source))
    try:
        return None if body is None else typed(Structure, json.loads(body))
    except (ValueError, KeyError, TypeError):
        return None


def store_traced(source: Source, structure: Structure) -> None:
    """Store a traced structure, if it may be kept; a directory that cannot be written is not an error."""
    if not _may_be_kept(source):
        return
    what = f"{structure.architecture}, {len(source.specs)} tensors"
    cache.store(KIND, _key(source), what, json.dumps(plain(structure)).encode())


def _key(source: Source) -> str:
    """The digest of everything that decides the structure of a source."""
    specs = [(spec.name, spec.shape, spec.dtype) for spec in source.specs.values()]
    return cache.digest_of([provenance(_packages(source)), without_origin(source.config), specs])


def _may_be_kept(source: Source) -> bool:
    def model_class(_: object) -> type:
        from bridge.sources.live_models import loading

        cls: type = loading.model_class(source.config)
        return cls

    return is_as_installed(_packages(source), source.config, model_class)


def _packages(source: Source) -> tuple[str, ...]:
    return (*PACKAGES, "diffusers") if is_diffusion(source.config) else PACKAGES
