"""`bridge.batch`: every row planned, refused or run, each outcome kept as it comes; converts nothing itself."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from bridge.batches.calibrations import bring, calibration_file, find_calibrations, make_jobs
from bridge.batches.engines import make_engine, make_settings
from bridge.batches.finished import file_digest, finished
from bridge.batches.job import failure
from bridge.batches.manifest import Manifest, read_manifest
from bridge.batches.planning import Dead, Planned, plan_rows
from bridge.batches.result import BatchReport, read_earlier
from bridge.batches.room import refuse, without_disk
from bridge.batches.values import PLANNED, Engine, Limits, Outcome, Row
from bridge.batches.watching import Audience, Counted
from bridge.errors import BatchError, UsageError, WriteError, nearest, number, reason
from bridge.progress import Progress, quiet
from bridge.remote.address import is_remote
from bridge.remote.outgoing import made_at, tidy
from bridge.visible import settle


@dataclass(frozen=True)
class Asked:
    """What a caller says about a manifest; None leaves it to the manifest."""

    engine: str | None = None
    workers: int | None = None
    memory: int | None = None
    dry_run: bool = False
    resume: bool = True
    strict: bool | None = None
    only: Sequence[str] = ()


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
    progress: Progress | None = None,
) -> BatchReport:
    """Run the rows of a manifest; one that fails harms no other. Finished rows of an earlier run are kept.

    Args:
        engine: "local" or "ray", in the place of what the manifest says, as the next three.
        workers: rows at once.
        memory: bytes, for all rows together.
        strict: run nothing if one row cannot run.
        dry_run: plan every row, and write nothing.
        resume: False runs finished rows again (those that may overwrite), and discards what killed rows left.
        only: names of rows, or globs; the others are left alone.
        progress: called with the rows that have ended, all rows, and a line on the last one.

    Raises:
        UsageError: with everything that is wrong with the manifest.
        BatchError, WriteError: nothing was run: (`strict`) a row cannot run, or the summary cannot be written.

    >>> import bridge
    >>> text = 'row = [{model = "examples/models/tiny-llama", target = "hf", quant = "int8_wo", out = "out"}]'
    >>> _ = Path("batch.toml").write_text(text)
    >>> bridge.batch("batch.toml", workers=1).passed
    True
    """
    names = (only,) if isinstance(only, str) else tuple(only or ())
    asked = Asked(engine, workers, memory, dry_run, resume, strict, names)
    return run(read_manifest(manifest), asked, Counted(progress or quiet))


def run(manifest: Manifest, asked: Asked, audience: Audience) -> BatchReport:
    """Run a manifest that was read, before an audience."""
    begin = time.perf_counter()
    name, limits = asked.engine or manifest.engine, manifest.limits
    settings = manifest.settings.get(name) or make_settings(name, {})
    limits = Limits(_positive(asked.workers) or limits.workers, _positive(asked.memory) or limits.memory)
    engine = make_engine(name, settings, limits)
    rows = [replace(row, resume=asked.resume) for row in _chosen(manifest, asked.only)]
    earlier = read_earlier(manifest.summary)
    report = BatchReport(
        str(manifest.path), name, engine.workers, tuple(rows), summary=str(manifest.summary), every=manifest.rows,
        before={row.name: end for row in manifest.rows if (end := earlier.outcome(row))} if asked.only else {},
        notes=manifest.notes,
    )  # fmt: skip
    known = dict(earlier.digests)
    for row in rows if not asked.dry_run else ():
        with suppress(ValueError):  # a journal that is no text: told where the row is run
            settle(made_at(row.out))
    dead = Dead()
    planned = plan_rows(rows, engine, dead)
    with _folder(manifest.summary, asked.dry_run) as folder:
        digests = find_calibrations(planned, folder, known)
        settled = {one.row.name: end for one in planned if (end := _settled(one, digests, engine, asked, dead))}
        pending = [one for one in planned if one.row.name not in settled]
        if engine.here and (refused := without_disk(pending)):
            pending = [one for one in pending if one.row.name not in refused]
            settled = {row.name: end for row in rows if (end := (settled | refused).get(row.name))}
        report = replace(report, outcomes=settled, digests=known | digests)
        audience.begin(report)
        if (manifest.strict if asked.strict is None else asked.strict) and report.failed:
            raise BatchError(f"{manifest.path}: {_refusals(report.failed)}")
        if asked.dry_run:
            drawn = {one.row.name: _drawn(one) for one in pending}
            ends = {row.name: (settled | drawn)[row.name] for row in rows}
            return replace(report, outcomes=ends, seconds=time.perf_counter() - begin)
        report.save()
        bring(pending, planned, folder, digests)
        jobs = make_jobs(pending, folder, engine.memory)
        with closing(engine.run(jobs, audience.event)) as outcomes:  # an interrupt: whoever works cleans up
            for outcome in outcomes:
                report = _with(report, outcome, planned, folder)
                report = replace(report, seconds=time.perf_counter() - begin)
                report.save()
                audience.ended(outcome)
        report = replace(report, seconds=time.perf_counter() - begin)
        report.save()
    return report


def _with(report: BatchReport, outcome: Outcome, planned: Sequence[Planned], folder: Path) -> BatchReport:
    """The report after one more outcome: of a row, or of a calibration, whose digest is kept."""
    if outcome.name in {row.name for row in report.rows}:
        ends = {**report.outcomes, outcome.name: outcome}
        return replace(report, outcomes={row.name: ends[row.name] for row in report.rows if row.name in ends})
    made = {key: file_digest(calibration_file(folder, key)) for key in {one.key for one in planned if one.key}}
    digests = {**report.digests, **{key: digest for key, digest in made.items() if digest}}
    return replace(report, calibrations=(*report.calibrations, outcome), digests=digests)


def _settled(planned: Planned, digests: dict[str, str], engine: Engine, asked: Asked, dead: Dead) -> Outcome | None:
    """How a row ends without being run: it cannot run, or did in an earlier batch."""
    if planned.failed:
        return planned.failed
    try:
        dead.check(planned.row.out, WriteError)
        kept = finished(planned, digests, dead) if asked.resume else None
        if kept and is_remote(planned.row.out) and not asked.dry_run:
            tidy(planned.row.out)
        ended = kept or refuse(planned, engine.memory)
        if not ended:  # what lies there was looked at
            dead.answered(planned.row.out)
        return ended
    except Exception as error:  # a bug costs its row, here as in a worker
        dead.note(planned.row.out, error)
        return failure(planned.row.name, error)


def _drawn(planned: Planned) -> Outcome:
    return Outcome(
        planned.row.name, PLANNED, bytes=planned.bytes, plan_digest=planned.digest, peak_memory=planned.memory
    )


def _chosen(manifest: Manifest, only: Sequence[str]) -> list[Row]:
    names = [row.name for row in manifest.rows]
    for glob in only:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(f"{manifest.path}: no row is called {glob!r}; {nearest(glob, names)}")
    return [row for row in manifest.rows if not only or any(fnmatchcase(row.name, glob) for glob in only)]


def _positive(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"workers and memory are 1 or more, not {value}")
    return value


def _refusals(failed: Sequence[Outcome]) -> str:
    lines = [f"{outcome.name}: {outcome.error}".replace("\n", "\n    ") for outcome in failed]
    return "\n  ".join([f"{number(len(failed), 'row')} cannot run, so none was started", *lines])


@contextmanager
def _folder(summary: Path, dry_run: bool) -> Iterator[Path]:
    """The batch's own directory, where shared calibrations lie until it ends; locked, so that no other batch takes it.

    A batch that is killed leaves it, and the next one goes on with what lies there.
    """
    folder = summary.parent / f".{summary.name}.work"
    if dry_run:
        yield folder
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        with suppress(OSError):  # it was made, and the lock was not
            folder.rmdir()
        raise WriteError(f"{folder}: cannot be created: {reason(error)}") from error
    with lock:
        busy = WriteError(f"{summary}: another process runs this batch; wait for it, or give one of them a `summary`")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = (folder / "lock").stat().st_ino
        except OSError as error:
            raise busy from error
        if here != os.fstat(lock.fileno()).st_ino:  # that process ended it while this one opened it
            raise busy
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
