"""Digests of steps, and notes in their outputs, to resume a chain."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError, reason
from bridge.core.output.names import MANIFEST
from bridge.core.output.temporary import write_whole
from bridge.core.parsing.limited import load_json
from bridge.core.parsing.relative import PLACES
from bridge.core.version import __version__
from bridge.reporting.report import report_from_dict
from bridge.sources.source import Source
from bridge.workflows.chain.read import ChainStep
from bridge.workflows.chain.result import StepDone

NOTE = "bridge/step.json"  # in a step's output: the digest of what made it
MAX_SIDE_FILE = 64 << 20  # bytes of a file in a tokenizer's directory; larger ones are weights


def is_noted(step: ChainStep) -> bool:
    """Whether the output of a step is one of this chain, perhaps of other inputs: it is replaced without asking."""
    return (step.out / NOTE).is_file()


def finished_step(step: ChainStep, digest: str) -> StepDone | None:
    """The output that this step made of the same inputs; None without one."""
    note = step.out / NOTE
    found, seconds = _read(note if note.exists() else _begun(step))  # it may have been killed between the two
    if found != digest or not (step.out / MANIFEST).is_file():
        return None
    try:
        report = report_from_dict(load_json(step.out / "report.json"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return StepDone(step.name, step.verb, report, seconds, kept=True)


def begin(step: ChainStep, digest: str) -> None:
    """Note that a step writes its output now."""
    if (step.out / MANIFEST).is_file() and not is_noted(step):
        _write(step.out / NOTE, "", 0.0)  # so that it is not taken for this step's if the step is killed
    _write(_begun(step), digest, 0.0)


def finish(step: ChainStep, digest: str, seconds: float) -> None:
    """Note that the output is whole."""
    _write(step.out / NOTE, digest, seconds)
    _begun(step).unlink(missing_ok=True)


def _begun(step: ChainStep) -> Path:
    """The file beside an output that tells which step was begun."""
    return step.out.parent / f".{step.out.name}.step.json"


def _write(path: Path, digest: str, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps({"digest": digest, "seconds": round(seconds, 3)}) + "\n").encode())


def _read(path: Path) -> tuple[str, float]:
    """Digest and seconds in a note; "" without one."""
    try:
        told = load_json(path)
        return str(told["digest"]), float(told["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0.0


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
                hashlib.file_digest(file, lambda: digest)  # goes on with this one
    except OSError as error:
        raise UsageError(f"{error.filename or path}: cannot be read: {reason(error)}") from error
    return digest.hexdigest()


def _is_small(file: Path) -> bool:
    return file.is_file() and file.stat().st_size <= MAX_SIDE_FILE
