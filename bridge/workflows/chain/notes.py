"""Note which step made an output, and find outputs that are finished."""

from __future__ import annotations

import json
from pathlib import Path

from bridge.core.output.names import MANIFEST
from bridge.core.output.temporary import write_whole
from bridge.core.parsing.limited import load_json
from bridge.reporting.report import report_from_dict
from bridge.workflows.chain.read import ChainStep
from bridge.workflows.chain.result import StepDone

NOTE = "bridge/step.json"  # in a step's output: the digest of what made it


def is_noted(step: ChainStep) -> bool:
    """Whether the output of a step is one of this chain, perhaps of other inputs: it is replaced without asking."""
    return (step.out / NOTE).is_file()


def kept_step(step: ChainStep, digest: str) -> StepDone | None:
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
