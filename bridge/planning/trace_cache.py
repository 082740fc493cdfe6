"""Cache traced structures in the user's cache directory; never fails a plan.

Tracing imports torch and takes seconds. A structure is used only if the same versions traced it for the same config and
tensors.
"""

from __future__ import annotations

import json

from bridge.core.output import cache
from bridge.core.typed_json import typed
from bridge.core.values import Structure, plain
from bridge.core.version import __version__, changed, installed
from bridge.sources.source import Source

KIND = "structures"


def load(source: Source) -> Structure | None:
    """The structure of an equal source that was traced before; None if there is no usable entry."""
    body = cache.load(KIND, _key(source))
    try:
        return None if body is None else typed(Structure, json.loads(body))
    except (ValueError, KeyError, TypeError):
        return None


def store(source: Source, structure: Structure) -> None:
    """Store a traced structure; a directory that cannot be written is not an error."""
    what = f"{structure.architecture}, {len(source.specs)} tensors"
    cache.store(KIND, _key(source), what, json.dumps(plain(structure)).encode())


def _key(source: Source) -> str:
    """The digest of everything that decides the structure of a source."""
    specs = [(spec.name, spec.shape, spec.dtype) for spec in source.specs.values()]
    made_by = [__version__, changed(), installed("transformers"), installed("diffusers"), installed("torch")]
    return cache.digest_of([made_by, dict(source.config), specs])
