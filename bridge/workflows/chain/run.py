"""The verb chain."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bridge.calibration.walk.workers.processes import Workers, check_same, joined
from bridge.core.errors import BridgeError
from bridge.core.output.replace import recover
from bridge.core.parsing.problems import Problems
from bridge.core.progress import Progress, no_progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.reporting.report import Report, report_from_dict
from bridge.workflows.chain.check import CheckedStep, check_steps
from bridge.workflows.chain.notes import begin, finish, is_noted
from bridge.workflows.chain.read import VERBS, ChainStep, read_steps, refuse
from bridge.workflows.chain.result import ChainReport, StepDone

SHARED = ("distill",)  # verbs that processes of `torchrun` share; the first one does the others


@shows_progress
def chain(
    path: str | Path, *, overwrite: bool = False, resume: bool = True, progress: Progress | bool | None = None
) -> ChainReport:
    """Run the steps of a chain file; see `bridge.workflows.chain.read` for its form.

    A step whose output is there, made by the same step of the same inputs, is kept; one that was killed goes on from
    its own states. The first step that fails its gates ends the chain, except a pruned model of a high perplexity that
    the next step distills. Processes of `torchrun` share the batches of distill; the first one does all the rest.

    Args:
        overwrite: replace outputs of other steps under the same names.
        resume: keep and continue what earlier runs left; False begins all steps again.

    Raises:
        UsageError: the file, or what headers tell of a step, is wrong: all problems at once, before the first step.
        BridgeError: of the step that fails, with its name; what is finished stays.

    >>> from pathlib import Path
    >>> steps = '[[step]]\\nname = "few"\\nverb = "prune"\\nmodel = "examples/models/tiny-llama"\\ndrop_layers = [3]\\n'
    >>> _ = Path("chain.toml").write_text(steps)
    >>> bridge.chain("chain.toml").passed
    True
    """
    return run_chain(Path(path), overwrite=overwrite, resume=resume, progress=callback_of(progress))


def run_chain(
    path: Path, out: Path | None = None, *, overwrite: bool, resume: bool, progress: Progress,
    workers: int | None = None,
) -> ChainReport:  # fmt: skip
    """Run a chain. `out`: a folder in place of the file's. `workers`: processes that share it, as in `calibrate`."""
    with joined(workers) as group:
        problems = Problems()
        steps = read_steps(path, out, problems)
        if group:
            check_same(group, {"chain": repr((steps, overwrite, resume))})
        first = group is None or group.first
        checked: Mapping[str, CheckedStep] = {}
        if first:
            progress(0, 0, "plan")
            for step in steps:
                recover(step.out)
            checked = check_steps(steps, problems, overwrite, resume)
        refuse(path, problems)
        done: list[StepDone] = []
        for at, step in enumerate(steps):
            with _named(path, step):
                if first:
                    done.append(_lead(step, checked[step.name], overwrite, resume, progress, group))
                elif group:
                    done.append(_follow(step, resume, group))
            if at + 1 < len(steps) and steps[at + 1].verb == "distill":  # it mends what pruning costs
                done[-1] = replace(done[-1], trained=True)
            if not done[-1].passed:
                break
        return ChainReport(tuple(done))


@contextmanager
def _named(path: Path, step: ChainStep) -> Iterator[None]:
    """Put the file and the step before the message of an error raised inside."""
    where = f"{path}: step {step.name}"
    try:
        yield
    except BridgeError as error:
        error.args = (f"{where}: {Exception.__str__(error)}",)
        raise
    except BaseException as error:
        error.add_note(f"in {where}")
        raise


def _lead(
    step: ChainStep, checked: CheckedStep, overwrite: bool, resume: bool, progress: Progress, group: Workers | None
) -> StepDone:
    """Run a step, or keep what an earlier run made, and tell the other processes."""
    replaces = overwrite or is_noted(step)
    if group:
        group.agree({"runs": checked.kept is None, "overwrite": replaces})
    if checked.kept:
        finish(step, checked.digest, checked.kept.seconds)
        done = checked.kept
    else:
        done = _run(step, checked.digest, replaces, resume, progress, group)
    if group:
        report = json.loads(done.report.to_json())
        group.agree({"report": report, "seconds": done.seconds, "kept": done.kept})
    return done


def _follow(step: ChainStep, resume: bool, group: Workers) -> StepDone:
    """Share a step that the first process runs, and return what it gave."""
    asked, *_ = group.agree(None)
    if asked["runs"] and step.verb in SHARED:
        VERBS[step.verb](
            **step.arguments, out=step.out, overwrite=asked["overwrite"], resume=resume, progress=no_progress
        )
    told, *_ = group.agree(None)
    return StepDone(step.name, step.verb, report_from_dict(told["report"]), told["seconds"], told["kept"])


def _run(
    step: ChainStep, digest: str, overwrite: bool, resume: bool, progress: Progress, group: Workers | None
) -> StepDone:
    """Run a step, and note in its output what made it."""
    begin(step, digest)
    start = time.perf_counter()

    def named(count: int, total: int, stage: str) -> None:
        progress(count, total, f"{step.name}: {stage}")

    report: Report = VERBS[step.verb](
        **step.arguments, out=step.out, overwrite=overwrite, resume=resume,
        progress=progress if progress is no_progress else named,
        workers=group.size if group and step.verb in SHARED else 1,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    finish(step, digest, seconds)
    return StepDone(step.name, step.verb, report, seconds)
