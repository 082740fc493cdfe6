"""Digest what makes the output of a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError, reason
from bridge.core.parsing.relative import PLACES
from bridge.core.version import __version__
from bridge.sources.source import Source
from bridge.workflows.chain.read import ChainStep

PIECE = 1 << 20
MAX_SIDE_FILE = 64 << 20  # bytes of a file in a tokenizer's directory; larger ones are weights


def digest_of(step: ChainStep, made: Mapping[str, str], sources: Mapping[str, Source]) -> str:
    """Digest of a step: its verb and arguments, the models and files that it reads, and the steps before it.

    `made`: output -> digest of the steps before. `sources`: the models of this step, opened, by argument.
    """
    parts: list[Any] = [__version__, step.verb]
    for key, value in sorted(step.arguments.items()):
        if isinstance(value, str) and value in made:
            parts.append([key, made[value]])
        elif key in sources:
            parts.append([key, sources[key].fingerprint])
        elif key == "teacher_cache":  # a place for what follows from the rest
            parts.append([key, True])
        elif key in PLACES and isinstance(value, str) and Path(value).exists():
            parts.append([key, _content(Path(value))])
        else:
            parts.append([key, value])
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _content(path: Path) -> str:
    """Digest of a file, or of the small files in a directory."""
    digest = hashlib.sha256()
    try:
        files = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if _is_small(file)]
        for one in files:
            digest.update(f"{one.name}\0".encode())
            with one.open("rb") as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
    except OSError as error:
        raise UsageError(f"{error.filename or path}: cannot be read: {reason(error)}") from error
    return digest.hexdigest()


def _is_small(file: Path) -> bool:
    return file.is_file() and file.stat().st_size <= MAX_SIDE_FILE
