"""Keeps traced structures in the user's cache directory, so that torch runs once a checkpoint; must never fail a plan.

A file is used only when it was made by the same code and versions for the same config and tensors, and is undamaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.values import InputGroup, Site, Structure

if TYPE_CHECKING:
    from bridge.sources import Source

_MADE_BY = (
    "trace.py",
    "inputs.py",
    "values.py",
    "sources/live.py",
    "sources/_probe.py",
    "graph/skeleton.py",
    "graph/tasks.py",
)
_MOST = 200  # files; the oldest go first


def recall(source: Source) -> Structure | None:
    """Return what tracing found for an equal source before, None where nothing usable is kept."""
    try:
        path, key = _place(source)
        head, _, body = path.read_text(encoding="utf-8").partition("\n")
        if head != _head(key, body):
            return None
        return _structure(json.loads(body))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # RuntimeError: there is no home directory
        return None


def remember(source: Source, structure: Structure) -> None:
    """Keep a traced structure; a directory that cannot be written is no error."""
    with suppress(OSError, RuntimeError):
        path, key = _place(source)
        body = json.dumps(_plain(structure))
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, hidden = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"{_head(key, body)}\n{body}")
            Path(hidden).replace(path)
        except BaseException:
            Path(hidden).unlink(missing_ok=True)
            raise
        kept = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in kept[:-_MOST]:
            old.unlink(missing_ok=True)


def _place(source: Source) -> tuple[Path, str]:
    """The file of a source, and the digest of all that its structure follows from."""
    package = Path(__file__).parent
    code = [hashlib.sha256((package / name).read_bytes()).hexdigest() for name in _MADE_BY]
    specs = [(spec.name, spec.shape, spec.dtype) for spec in source.specs.values()]
    versions = [_version(name) for name in ("transformers", "torch")]
    key = _digest([code, versions, dict(source.config), specs])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qbridge" / "structures" / f"{key[:32]}.json", key


def _head(key: str, body: str) -> str:
    """The first line of a file: what it is for, and that the rest is as it was written."""
    return f"{key} {hashlib.sha256(body.encode()).hexdigest()}"


def _version(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version(name)
    return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def _plain(structure: Structure) -> dict[str, Any]:
    return {
        **vars(structure),
        "sites": [vars(site) for site in structure.sites],
        "groups": [vars(group) for group in structure.groups],
    }


def _structure(body: dict[str, Any]) -> Structure:
    sites = tuple(Site(**{**site, "roles": tuple(site["roles"])}) for site in body["sites"])
    groups = tuple(InputGroup(**{**group, "modules": tuple(group["modules"])}) for group in body["groups"])
    tuples = {key: tuple(body[key]) for key in ("attention", "order", "embeddings")}
    roles = {name: tuple(held) for name, held in body["roles"].items()}
    return Structure(**{**body, **tuples, "sites": sites, "groups": groups, "roles": roles})
