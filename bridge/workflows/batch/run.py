"""`bridge.batch`: plan, refuse or run every row, and save each outcome."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from bridge.core.addresses import is_remote
from bridge.core.errors import BatchError, UsageError, WriteError, disk_is_full, reason
from bridge.core.output.directory import HOW_TO_GO_ON
from bridge.core.output.replace import recover
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, is_bars, shows_progress
from bridge.core.remote.staged import staging_path
from bridge.core.remote.upload import tidy
from bridge.core.text import nearest, number
from bridge.workflows.batch.engines import make_engine, make_settings
from bridge.workflows.batch.job import failure
from bridge.workflows.batch.manifest.read import Manifest, read_manifest
from bridge.workflows.batch.observers import Counted, Observer
from bridge.workflows.batch.prepare.calibrations import (
    LOCK,
    copy_calibrations,
    drop_calibrations,
    find_calibrations,
    make_jobs,
    remove,
)
from bridge.workflows.batch.prepare.outputs import finished, refuse, without_disk
from bridge.workflows.batch.prepare.plan import PlannedRow, UnreachableServers, plan_rows, unused_arguments
from bridge.workflows.batch.report import BatchReport, read_earlier
from bridge.workflows.batch.values import PLANNED, Engine, Limits, Outcome, Row


@dataclass(frozen=True)
class BatchOptions:
    """The arguments of a batch; None takes the manifest's value."""

    engine: str | None = None
    workers: int | None = None
    memory: int | None = None
    dry_run: bool = False
    resume: bool = True
    strict: bool | None = None
    only: Sequence[str] = ()


KEPT = "finished rows are kept, and parts of others in .OUT.partial beside each OUT; "


@shows_progress
def batch(
    manifest: str | Path,
    *,
    engine: str | None = None,
    workers: int | None = None,
    memory: int | None = None,
    dry_run: bool = False,
    resume: bool = True,
    only: str | Sequence[str] | None = None,
    strict: bool | None = None,
    progress: Progress | bool | None = None,
) -> BatchReport:
    """Run the rows of a manifest; a failed row does not stop the others. Finished rows of an earlier run are kept.

    Args:
        engine: "local" or "ray"; this and the next three override the manifest.
        workers: rows at the same time.
        memory: bytes, for all rows together.
        strict: run nothing if one row cannot run.
        dry_run: plan every row and write nothing.
        resume: False runs finished rows again (if they may overwrite) and discards what unfinished rows left.
        only: names of rows, or globs; the other rows are not run.
        progress: called with the number of finished rows, the number of rows, and a line on the last finished row.

    Raises:
        UsageError: lists all problems of the manifest.
        BatchError, WriteError: nothing was run: (`strict`) a row cannot run, or the summary cannot be written.

    >>> import bridge
    >>> text = 'row = [{model = "examples/models/tiny-llama", target = "hf", quant = "int8_wo", out = "out"}]'
    >>> _ = Path("batch.toml").write_text(text)
    >>> bridge.batch("batch.toml", workers=1).passed
    True
    """
    names = (only,) if isinstance(only, str) else tuple(only or ())
    options = BatchOptions(engine, workers, memory, dry_run, resume, strict, names)
    callback = callback_of(progress)
    rows = (lambda done, total, _: callback(done, total, "rows")) if is_bars(callback) else callback
    return run(read_manifest(manifest), options, Counted(rows))


def run(manifest: Manifest, options: BatchOptions, observer: Observer) -> BatchReport:
    """Run a manifest; `observer` is called with what happens."""
    begin = time.perf_counter()
    name, limits = options.engine or manifest.engine, manifest.limits
    settings = manifest.settings.get(name) or make_settings(name, {})
    limits = Limits(_positive(options.workers) or limits.workers, _positive(options.memory) or limits.memory)
    engine = make_engine(name, settings, limits)
    rows = [replace(row, resume=options.resume) for row in _selected(manifest, options.only)]
    earlier = read_earlier(manifest.summary)
    report = BatchReport(
        str(manifest.path), name, engine.workers, tuple(rows), summary=str(manifest.summary), every=manifest.rows,
        before={row.name: end for row in manifest.rows if (end := earlier.outcome(row))} if options.only else {},
        notes=manifest.notes,
    )  # fmt: skip
    known = dict(earlier.digests)
    for row in rows if not options.dry_run else ():
        with suppress(ValueError):  # a damaged journal: reported when the row runs
            recover(staging_path(row.out))
    unreachable = UnreachableServers()
    planned = plan_rows(rows, engine, unreachable)
    report = replace(report, notes=(*report.notes, *unused_arguments(planned)))
    with _folder(manifest.summary, options) as folder:
        digests = find_calibrations(planned, folder, known)
        decided = {p.row.name: end for p in planned if (end := _outcome(p, digests, engine, options, unreachable))}
        if engine.here:
            decided |= without_disk([one for one in planned if one.row.name not in decided])
        pending = [one for one in planned if one.row.name not in decided]
        report = replace(report, outcomes=_in_order(decided, rows), digests=known | digests)
        observer.begin(report)
        if (manifest.strict if options.strict is None else options.strict) and report.failed:
            raise BatchError(f"{manifest.path}: {_refusals(report.failed)}")
        if options.dry_run:
            ends = decided | {one.row.name: _planned_outcome(one) for one in pending}
            return replace(report, outcomes=_in_order(ends, rows), seconds=time.perf_counter() - begin)
        report.save()
        copy_calibrations(pending, planned, folder, digests)
        jobs = make_jobs(pending, folder, engine.memory)
        with closing(engine.run(jobs, observer.event)) as outcomes:  # on an interrupt, running jobs keep what is done
            for outcome in outcomes:
                report = replace(_with(report, outcome, planned, folder), seconds=time.perf_counter() - begin)
                report.save()
                observer.ended(outcome)
        report = replace(report, seconds=time.perf_counter() - begin)
        report.save()
        drop_calibrations(planned, report.outcomes, folder, every=not options.only)
    return report


def _with(report: BatchReport, outcome: Outcome, planned: Sequence[PlannedRow], folder: Path) -> BatchReport:
    """The report with one more outcome: of a row, or of a calibration, whose digest is added."""
    if outcome.name in {row.name for row in report.rows}:
        return replace(report, outcomes=_in_order({**report.outcomes, outcome.name: outcome}, report.rows))
    digests = {**report.digests, **find_calibrations(planned, folder, {})}
    return replace(report, calibrations=(*report.calibrations, outcome), digests=digests)


def _in_order(outcomes: Mapping[str, Outcome], rows: Sequence[Row]) -> dict[str, Outcome]:
    """The outcomes in the order of their rows."""
    return {row.name: outcomes[row.name] for row in rows if row.name in outcomes}


def _outcome(
    planned: PlannedRow, digests: dict[str, str], engine: Engine, options: BatchOptions, unreachable: UnreachableServers
) -> Outcome | None:
    """The outcome of a row that is not run: it cannot run, or finished in an earlier batch; else None."""
    if planned.failed:
        return planned.failed
    try:
        unreachable.check(planned.row.out, WriteError)
        kept = finished(planned, digests, unreachable) if options.resume else None
        if kept and is_remote(planned.row.out) and not options.dry_run:
            tidy(planned.row.out)
        outcome = kept or refuse(planned, engine.memory)
        if not outcome:  # the output was listed
            unreachable.answered(planned.row.out)
        return outcome
    except Exception as error:  # a bug fails its row only, as in a worker
        unreachable.note(planned.row.out, error)
        return failure(planned.row.name, error)


def _planned_outcome(one: PlannedRow) -> Outcome:
    return Outcome(one.row.name, PLANNED, bytes=one.bytes, plan_digest=one.digest, peak_memory=one.memory)


def _selected(manifest: Manifest, only: Sequence[str]) -> list[Row]:
    names = [row.name for row in manifest.rows]
    for glob in only:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(f"{manifest.path}: no row is named {glob!r}; {nearest(glob, names)}")
    return [row for row in manifest.rows if not only or any(fnmatchcase(row.name, glob) for glob in only)]


def _positive(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"workers and memory must be 1 or more, not {value}")
    return value


def _refusals(failed: Sequence[Outcome]) -> str:
    lines = [f"{outcome.name}: {outcome.error}".replace("\n", "\n    ") for outcome in failed]
    return "\n  ".join([f"{number(len(failed), 'row')} cannot run, so none was started", *lines])


@contextmanager
def _folder(summary: Path, options: BatchOptions) -> Iterator[Path]:
    """The working directory of the batch, for shared calibrations, locked against other processes.

    It is removed at the end unless a calibration is left in it, which the next run of the batch uses. A run that does
    not resume begins with an empty one.
    """
    folder = summary.parent / f".{summary.name}.work"
    if options.dry_run:
        yield folder
        return
    new = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        with suppress(OSError):  # the directory exists, the lock does not
            folder.rmdir()
        raise WriteError(f"{folder}: cannot be created: {reason(error)}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / LOCK).stat().st_ino != os.fstat(lock.fileno()).st_ino:
                raise FileNotFoundError("the other process removed the directory meanwhile")
        except OSError as error:
            busy = f"{summary}: another process runs this batch; wait for it, or set another `summary`"
            raise WriteError(busy) from error
        for path in folder.iterdir() if not options.resume else ():
            if path.name != LOCK:
                remove(path)
        try:
            yield folder
        except BaseException as error:
            if not isinstance(error, Exception) or disk_is_full(error):
                error.add_note(KEPT + HOW_TO_GO_ON[options.resume])
            raise
        finally:
            with suppress(OSError):
                if {path.name for path in folder.iterdir()} <= {LOCK}:
                    shutil.rmtree(folder, ignore_errors=True)
                    _remove_empty(new)


def _remove_empty(directories: Sequence[Path]) -> None:
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()
