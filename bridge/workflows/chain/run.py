"""The verb chain."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError
from bridge.core.output.names import MANIFEST
from bridge.core.output.temporary import write_whole
from bridge.core.parsing import load_json
from bridge.core.progress import Progress, no_progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.version import __version__
from bridge.reporting.report import Report, report_from_dict
from bridge.sources.opening import open_source
from bridge.workflows.chain.read import VERBS, ChainStep, read_chain
from bridge.workflows.chain.result import ChainReport, StepDone

NOTE = "bridge/step.json"  # in a step's output: the digest of what made it
MODELS = ("model", "student", "teacher")
PIECE = 1 << 20


@shows_progress
def chain(
    path: str | Path, *, overwrite: bool = False, resume: bool = True, progress: Progress | bool | None = None
) -> ChainReport:
    """Run the steps of a chain file; see `bridge.workflows.chain.read` for its form.

    A step whose output is there, made by the same step of the same inputs, is kept; one that was killed goes on from
    its own states. The first step that fails its gates ends the chain.

    Args:
        overwrite: replace outputs of other steps under the same names.
        resume: keep and continue what earlier runs left; False begins all steps again.

    Raises:
        UsageError: the file is wrong, all problems at once; an output of something else has a step's name.
        BridgeError: of the step that cannot run; what is finished stays.

    >>> from pathlib import Path
    >>> steps = '[[step]]\\nname = "few"\\nverb = "prune"\\nmodel = "examples/models/tiny-llama"\\ndrop_layers = [3]\\n'
    >>> _ = Path("chain.toml").write_text(steps)
    >>> bridge.chain("chain.toml").passed
    True
    """
    steps, callback = read_chain(Path(path)), callback_of(progress)
    made: dict[str, str] = {}
    done: list[StepDone] = []
    for step in steps:
        made[step.name] = digest_of(step, made)
        kept = _kept(step, made[step.name]) if resume else None
        done.append(kept or _run(step, made[step.name], overwrite, resume, callback))
        if not done[-1].report.passed:
            break
    return ChainReport(tuple(done))


def digest_of(step: ChainStep, made: Mapping[str, str]) -> str:
    """Digest of a step: its verb and arguments, the models and files that it reads, and the steps before it."""
    parts: list[Any] = [__version__, step.verb, [made[name] for name in step.after]]
    outputs = {str(step.out.parent / name): made[name] for name in step.after}
    for key, value in sorted(step.arguments.items()):
        if isinstance(value, str) and value in outputs:
            parts.append([key, outputs[value]])
        elif key in MODELS:
            parts.append([key, open_source(value).fingerprint])
        elif isinstance(value, str) and Path(value).is_file():
            parts.append([key, _content(Path(value))])
        else:
            parts.append([key, bool(value) if key == "teacher_cache" else value])
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _content(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _kept(step: ChainStep, digest: str) -> StepDone | None:
    """The output that this step made of the same inputs; None without one."""
    note = step.out / NOTE
    if not note.exists() and _noted(_begun(step))[0] == digest and (step.out / MANIFEST).is_file():
        _finish(step, digest, 0.0)  # it was killed between the two
    found, seconds = _noted(note)
    if found != digest or not (step.out / MANIFEST).is_file():
        return None
    try:
        report = report_from_dict(load_json(step.out / "report.json"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return StepDone(step.name, step.verb, report, seconds, kept=True)


def _run(step: ChainStep, digest: str, overwrite: bool, resume: bool, progress: Progress) -> StepDone:
    """Run one step, and note in its output what made it."""
    note, there = step.out / NOTE, step.out.exists()
    ours = note.is_file()  # of this chain, with other inputs: replaced without asking
    if there and not (overwrite or ours):
        raise UsageError(
            f"{step.out}: exists, and step {step.name} of this chain did not make it; move it away, or overwrite it "
            "(overwrite=True, --overwrite)"
        )
    if (step.out / MANIFEST).is_file() and not ours:
        _write(note, "")  # so that it is not taken for this step's if the step is killed
    _write(_begun(step), digest)
    begin = time.perf_counter()

    def named(count: int, total: int, stage: str) -> None:
        progress(count, total, f"{step.name}: {stage}")

    report: Report = VERBS[step.verb](
        **step.arguments, out=step.out, overwrite=overwrite or ours, resume=resume,
        progress=progress if progress is no_progress else named,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    _finish(step, digest, seconds)
    return StepDone(step.name, step.verb, report, seconds)


def _begun(step: ChainStep) -> Path:
    """The file beside an output that tells which step was begun."""
    return step.out.parent / f".{step.out.name}.step.json"


def _finish(step: ChainStep, digest: str, seconds: float) -> None:
    _write(step.out / NOTE, digest, seconds)
    _begun(step).unlink()


def _write(path: Path, digest: str, seconds: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps({"digest": digest, "seconds": round(seconds, 3)}) + "\n").encode())


def _noted(path: Path) -> tuple[str, float]:
    """Digest and seconds in a note; "" without one."""
    try:
        told = load_json(path)
        return str(told["digest"]), float(told["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0.0
