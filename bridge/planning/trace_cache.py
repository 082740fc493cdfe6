"""Cache traced structures in the user's cache directory; never fails a plan.

Tracing imports torch and takes seconds. A file is used only if it is undamaged and the same versions wrote it for the
same config and tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from bridge.core.mappings import mappings
from bridge.core.output.temporary import write_whole
from bridge.core.typed_json import typed
from bridge.core.values import Structure, plain
from bridge.core.version import __version__, installed
from bridge.sources.source import Source

MAX_FILES = 200  # of the cache; the oldest are removed first


def load(source: Source) -> Structure | None:
    """The structure of an equal source that was traced before; None if there is no usable file."""
    try:
        path, key = _place(source)
        head, _, body = path.read_text(encoding="utf-8").partition("\n")
        return typed(Structure, json.loads(body)) if head == _head(key, body) else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # RuntimeError: there is no home directory
        return None


def store(source: Source, structure: Structure) -> None:
    """Store a traced structure; a directory that cannot be written is not an error."""
    with suppress(OSError, RuntimeError):
        path, key = _place(source)
        body = json.dumps(plain(structure))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{_head(key, body)}\n{body}".encode())
        by_age = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-MAX_FILES]:
            old.unlink(missing_ok=True)


def _place(source: Source) -> tuple[Path, str]:
    """The file of a source, and the digest of everything that decides its structure."""
    specs = [(spec.name, spec.shape, spec.dtype) for spec in source.specs.values()]
    made_by = [__version__, _changed(), installed("transformers"), installed("torch")]
    content = json.dumps([made_by, dict(source.config), specs], sort_keys=True, default=repr)
    key = hashlib.sha256(content.encode()).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qbridge" / "structures" / f"{key[:32]}.json", key


def _changed() -> int:
    """When a checkout was last changed, since its version stays the same; 0 for an installed package."""
    code = mappings().with_name("bridge")  # next to the tables only in a checkout
    return max((path.stat().st_mtime_ns for path in code.rglob("*.py")), default=0)


def _head(key: str, body: str) -> str:
    """The first line of a file: the digests of its source and of the rest of the file."""
    return f"{key} {hashlib.sha256(body.encode()).hexdigest()}"
