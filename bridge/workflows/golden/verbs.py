"""The verbs of goldens: record, check, diff."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge.api.verbs import verify
from bridge.core.addresses import check_length, is_remote
from bridge.core.errors import GoldenError, UsageError
from bridge.core.output.names import MANIFEST
from bridge.core.output.replace import recover
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.remote.opening import written_at
from bridge.core.version import __version__, versions
from bridge.reporting.report import verdict
from bridge.workflows.golden.differences import Difference, Differences, compare, compare_outputs, lines
from bridge.workflows.golden.reconvert import arguments, converted
from bridge.workflows.golden.reference_run import reference
from bridge.workflows.golden.snapshot import SnapshotReader
from bridge.workflows.golden.store import MARK, Change, Golden, Reference, is_golden, load

NOT_REQUESTED = "a run was not requested"
ALWAYS = ("qbridge", "numpy", "numba")  # affect every model; other packages only if they run or export it


@shows_progress
def record(
    out: str | Path,
    directory: str | Path,
    *,
    reason: str = "",
    against: Any = None,
    quant: str | Path | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    tolerance: float | None = None,
    run: bool = True,
    progress: Progress | bool | None = None,
) -> Golden:
    """Record the output `out` in the golden `directory`; an equal golden is left as it is.

    Args:
        reason: why an existing golden changes; saved with the date and the differences.
        against: the model that `out` was made from: `out` is verified first, and not recorded if that fails.
        quant: the path of the recipe that it was converted with, if any.
        inputs: inputs of the run; None takes fixed token ids or a fixed image.
        tolerance: allowed difference of the outputs of another run, relative L2; None takes the cost of rounding.
        run: False records bytes only.

    Raises:
        GoldenError: the golden would change and no reason was given, `out` fails its verification, or it cannot be run
            although `inputs` or `tolerance` is given.

    >>> import bridge
    >>> report = bridge.convert("examples/models/tiny-llama", "hf", "int8_wo", "to-record", verify=False)
    >>> golden = bridge.golden.record("to-record", "golden/recorded", run=False)
    >>> len(golden.snapshot.tensors)
    83
    """
    directory, out = _in_order(directory, out)
    callback, directory, output = callback_of(progress), Path(directory), written_at(out)
    reader = SnapshotReader(output, callback)
    if against is not None and not (report := verify(out, against, progress=callback)).passed:
        raise GoldenError(f"{report.out} differs too much from its source to be a golden: {verdict(report)}")
    recover(directory, MARK)
    old = load(directory) if is_golden(directory) else None
    snapshot = reader.snapshot(statistics=True)
    feeds = inputs if inputs is not None or old is None else old.reference.inputs
    ran = reference(output, reader.plan, feeds, tolerance) if run else Reference(not_run=NOT_REQUESTED)
    if run and ran.not_run and (inputs is not None or tolerance is not None):
        argument = "inputs=" if inputs is not None else "tolerance= (--tolerance)"
        raise GoldenError(f"{output} was not run, but {argument} needs its outputs: {ran.not_run}; leave it out")
    rerun, extra_files = arguments(reader.plan, output, quant)
    new = Golden(snapshot, ran, rerun, _versions(reader, ran), old.history if old else (), extra_files)
    return _save(new, old, directory, str(output), reason)


def _save(new: Golden, old: Golden | None, directory: Path, output: str, reason: str) -> Golden:
    """Save a golden unless it equals the old one, which is returned then; a change needs a reason."""
    moves = _moves(old, new) if old else []
    if old and not moves:
        if not new.reference.values:
            new = replace(new, reference=old.reference)  # equal bytes give equal outputs
        if _same_arguments(old, new):
            return old
    if old and not reason:
        moved = Differences(str(directory), output, len(new.snapshot.tensors), tuple(moves))
        raise GoldenError(f"{directory} would change; say why: reason= (--reason TEXT)\n{moved}")
    if reason:
        version = f"{old.versions.get('qbridge')} -> {__version__}" if old else __version__
        change = Change(datetime.date.today().isoformat(), reason, version, tuple(lines(moves)))
        new = replace(new, history=(*new.history, change))
    new.save(directory)
    return new


@shows_progress
def check(
    directory: str | Path,
    out: str | Path | None = None,
    *,
    model: Any = None,
    calib: Any = None,
    run: bool | None = None,
    work: str | Path | None = None,
    config: Any = None,
    tokenizer: Any = None,
    progress: Progress | bool | None = None,
) -> Differences:
    """Check a model against its golden: read `out` again, or convert `model` again.

    Args:
        model: the source of the golden's model; it is converted into a temporary directory under `work`.
        calib: another calibration than the golden's own, as `convert` takes it.
        run: True also runs the model, False never; None only if a byte has moved, since equal bytes give equal outputs.

    >>> import bridge
    >>> report = bridge.convert("examples/models/tiny-llama", "hf", "int8_wo", "to-check", verify=False)
    >>> golden = bridge.golden.record("to-check", "golden/checked", run=False)
    >>> bridge.golden.check("golden/checked", "to-check").passed
    True
    """
    if (out is None) == (model is None):
        raise UsageError("check takes either a written model or the model to convert again: OUT, or model=")
    directory, out = _in_order(directory, out)
    recover(Path(directory), MARK)
    callback, golden = callback_of(progress), load(Path(directory))
    conversion = converted(golden, model, calib, work, callback, config=config, tokenizer=tokenizer)
    with conversion if out is None else nullcontext(written_at(out)) as output:
        reader = SnapshotReader(output, callback)
        snapshot = reader.snapshot()
        moves = compare(golden.snapshot, snapshot, golden.statistics, reader.statistics)
        try:
            ran = _run_again(golden, reader, run, bool(moves))
        except Exception as error:  # of any class, from torch and ONNX Runtime; a difference may be the cause
            ran = Reference()
            moves.append(Difference("outputs", "output", f"no longer runs: {type(error).__name__}: {error}"))
    moves += compare_outputs(golden.reference, ran) if ran.values else []
    notes = _notes(golden.versions, _versions(reader, ran))
    notes += [f"outputs were not compared: {ran.not_run}"] if ran.not_run else []
    after = str(reader.directory) if out is not None else "a new conversion"
    return Differences(str(directory), after, len(golden.snapshot.tensors), tuple(moves), tuple(notes))


def _in_order(golden: Any, out: Any) -> tuple[Any, Any]:
    """The golden and the written model, which may be given in either order: a manifest tells which is which."""
    if out is None or is_remote(out) or (not is_remote(golden) and is_golden(Path(golden))):
        return golden, out
    check_length(Path(out))
    written = is_remote(golden) or (Path(golden) / MANIFEST).is_file()
    return (out, golden) if written and not (Path(out) / MANIFEST).is_file() else (golden, out)


@shows_progress
def diff(a: str | Path, b: str | Path, *, progress: Progress | bool | None = None) -> Differences:
    """List what moved from `a` to `b`, each a golden or a written model; outputs are compared between goldens only.

    >>> import bridge
    >>> for name, quant in (("one", "int8_wo"), ("other", "fp8_pc_pt")):
    ...     report = bridge.convert("examples/models/tiny-llama", "hf", quant, name, verify=False)
    >>> bridge.golden.diff("one", "other").passed
    False
    """
    places = written_at(a), written_at(b)
    sides = [load(place) if is_golden(place) else SnapshotReader(place, callback_of(progress)) for place in places]
    before, after = (side.snapshot if isinstance(side, Golden) else side.snapshot() for side in sides)
    moves, notes = compare(before, after, sides[0].statistics, sides[1].statistics), []
    if isinstance(sides[0], Golden) and isinstance(sides[1], Golden):
        one, other = sides[0].reference, sides[1].reference
        notes = _notes(sides[0].versions, sides[1].versions)
        if one.values and other.values and _same_inputs(one, other):
            moves += compare_outputs(one, other)
        else:
            notes.append("outputs were not compared: one was not run, or the inputs differ")
    return Differences(str(places[0]), str(places[1]), len(before.tensors), tuple(moves), tuple(notes))


def _moves(old: Golden, new: Golden) -> list[Difference]:
    moves = compare(old.snapshot, new.snapshot, old.statistics, new.statistics)
    comparable = new.reference.values and _same_inputs(old.reference, new.reference)
    return moves + (compare_outputs(old.reference, new.reference) if comparable else [])


def _same_arguments(old: Golden, new: Golden) -> bool:
    """Whether inputs, tolerance, recipe and the presence of a run are the same."""
    a, b = old.reference, new.reference
    runs = bool(a.values) == bool(b.values) and a.tolerance == b.tolerance and _same_inputs(a, b)
    return runs and old.rerun == new.rerun and old.extra_files == new.extra_files


def _run_again(golden: Golden, reader: SnapshotReader, run: bool | None, moved: bool) -> Reference:
    recorded = golden.reference
    if recorded.not_run:
        return Reference(not_run=f"the golden has none: {recorded.not_run}")
    if run is False:
        return Reference(not_run=NOT_REQUESTED)
    if run is None and not moved:
        return Reference()
    return reference(reader.directory, reader.plan, recorded.inputs, recorded.tolerance)


def _same_inputs(one: Reference, other: Reference) -> bool:
    a, b = one.inputs, other.inputs
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def _versions(reader: SnapshotReader, ran: Reference) -> dict[str, str]:
    """Versions of the packages that affect the bytes or the run."""
    names = {*ALWAYS}
    if ran.values or reader.plan.traced or reader.plan.target in ("trt", "ort"):
        names |= {"torch", "transformers"}
    if reader.plan.target in ("trt", "ort"):
        names |= {"onnx", "onnx-ir", "onnxruntime"}
    return {name: version for name, version in versions().items() if name in names}


def _notes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Versions that differ. They do not count: the bytes show their effect."""
    names = [name for name in sorted(before.keys() & after.keys()) if before[name] != after[name]]
    moved = ", ".join(f"{name} {before[name]} -> {after[name]}" for name in names)
    return [f"versions: {moved}"] if moved else []
