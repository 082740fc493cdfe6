"""The verbs of goldens: record, check, diff. No stage is written here."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import __version__
from bridge.errors import GoldenError, UsageError
from bridge.finish import versions
from bridge.golden.again import arguments, converted
from bridge.golden.moves import Move, Moved, compare, outputs_moved, versions_moved
from bridge.golden.reading import Written
from bridge.golden.running import reference
from bridge.golden.store import MARK, Golden, is_golden, load
from bridge.golden.text import lines
from bridge.golden.values import Change, Reference
from bridge.progress import Progress, quiet
from bridge.remote.opening import written_at
from bridge.visible import settle

if TYPE_CHECKING:
    import numpy as np

ALWAYS = ("qbridge", "numpy", "numba")  # had a part in every model; other packages where they ran it or exported it


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
    progress: Progress | None = None,
) -> Golden:
    """Record what `convert` wrote to `out` in the golden `directory`; a golden of the same is left as it is.

    Args:
        reason: why an existing golden changes; it is kept, with the date and what had moved.
        against: the model that `out` was made from: it is verified first, and no golden is made of what fails.
        quant: the path of the recipe that it was converted by, where it was one.
        inputs: what to run it on; None draws token ids, the same ones each time.
        tolerance: how far outputs of another run may be off, relative L2; None knows what rounding costs.
        run: False keeps bytes alone.

    Raises:
        GoldenError: the golden would change and no reason was given, `out` is not near enough to `against`, or it was
            not run and `inputs` or `tolerance` are given.

    >>> import bridge
    >>> report = bridge.convert("examples/models/tiny-llama", "hf", "int8_wo", "to-record", verify=False)
    >>> made = bridge.golden.record("to-record", "golden/recorded", run=False)
    >>> len(made.snapshot.tensors)
    83
    """
    tell, directory, place = progress or quiet, Path(directory), written_at(out)
    written = Written(place, tell)
    if against is not None:
        _verify(out, against, tell)
    settle(directory, MARK)
    old = load(directory) if is_golden(directory) else None
    snapshot = written.snapshot(statistics=True)
    feeds = inputs if inputs is not None or old is None else old.reference.inputs
    ran = reference(place, written.plan, feeds, tolerance) if run else Reference(not_run="it was not asked for")
    if run and ran.not_run and (inputs is not None or tolerance is not None):
        asked = "inputs=" if inputs is not None else "tolerance=, --tolerance"
        raise GoldenError(f"{place} was not run, and {asked} asks for its outputs: {ran.not_run}; leave it out")
    rerun, beside = arguments(written.plan, place, quant)
    new = Golden(snapshot, ran, rerun, _versions(written, ran), old.history if old else (), beside)
    moves = _moves(old, new) if old else []
    if old and not moves:
        new = replace(new, reference=ran if ran.values else old.reference)  # equal bytes give equal outputs
        if _kept_alike(old, new):
            return old
    if old and not reason:
        told = Moved(str(directory), str(place), len(snapshot.tensors), tuple(moves))
        raise GoldenError(f"{directory} would change; say why: reason=, --reason TEXT\n{told}")
    if reason:
        new = replace(new, history=(*new.history, _change(old, reason, moves)))
    new.save(directory)
    return new


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
    progress: Progress | None = None,
) -> Moved:
    """Say what of a written model is not what its golden has: read `out` again, or convert `model` again.

    Args:
        model: what the golden's model was made from; it is converted into a temporary directory under `work`.
        calib: another calibration than the golden's own, as `convert` takes it.
        run: True runs the model too, False never; None does where a byte has moved: equal bytes give equal outputs.

    >>> import bridge
    >>> report = bridge.convert("examples/models/tiny-llama", "hf", "int8_wo", "to-check", verify=False)
    >>> made = bridge.golden.record("to-check", "golden/checked", run=False)
    >>> bridge.golden.check("golden/checked", "to-check").passed
    True
    """
    if (out is None) == (model is None):
        raise UsageError("check takes either what was written, or the model to convert once more: OUT, or model=")
    settle(Path(directory), MARK)
    tell, golden = progress or quiet, load(Path(directory))
    again = converted(golden, model, calib, work, tell, config=config, tokenizer=tokenizer)
    with again if out is None else nullcontext(written_at(out)) as read:
        written = Written(read, tell)
        snapshot = written.snapshot()
        moves = compare(golden.snapshot, snapshot, (golden, written))
        try:
            ran = _reference_again(golden, written, run, bool(moves))
        except Exception as error:  # what moved may be why: torch and ONNX Runtime raise what they like
            ran = Reference()
            moves.append(Move("outputs", "output", f"does not run any more: {type(error).__name__}: {error}"))
    moves += outputs_moved(golden.reference, ran) if ran.values else []
    notes = _notes(golden.versions, _versions(written, ran))
    notes += [f"outputs were not compared: {ran.not_run}"] if ran.not_run else []
    after = str(written.directory) if out is not None else "a new conversion"
    return Moved(str(directory), after, len(golden.snapshot.tensors), tuple(moves), tuple(notes))


def diff(a: str | Path, b: str | Path, *, progress: Progress | None = None) -> Moved:
    """Say what moved from `a` to `b`, each a golden or what `convert` wrote; outputs are compared between goldens.

    >>> import bridge
    >>> for name, quant in (("one", "int8_wo"), ("other", "fp8_pc_pt")):
    ...     report = bridge.convert("examples/models/tiny-llama", "hf", quant, name, verify=False)
    >>> bridge.golden.diff("one", "other").passed
    False
    """
    places = written_at(a), written_at(b)
    sides = [load(place) if is_golden(place) else Written(place, progress or quiet) for place in places]
    before, after = (side.snapshot if isinstance(side, Golden) else side.snapshot() for side in sides)
    moves, notes = compare(before, after, (sides[0], sides[1])), []
    if isinstance(sides[0], Golden) and isinstance(sides[1], Golden):
        one, other = sides[0].reference, sides[1].reference
        notes = _notes(sides[0].versions, sides[1].versions)
        if one.values and other.values and _same_inputs(one, other):
            moves += outputs_moved(one, other)
        else:
            notes.append("outputs were not compared: the two were not run, or not on the same inputs")
    return Moved(str(places[0]), str(places[1]), len(before.tensors), tuple(moves), tuple(notes))


def _moves(old: Golden, new: Golden) -> list[Move]:
    moves = compare(old.snapshot, new.snapshot, (old, new))
    comparable = new.reference.values and _same_inputs(old.reference, new.reference)
    return moves + (outputs_moved(old.reference, new.reference) if comparable else [])


def _kept_alike(old: Golden, new: Golden) -> bool:
    """Whether nothing else that a golden keeps was asked for: other inputs, a tolerance, a recipe, a first run."""
    a, b = old.reference, new.reference
    runs = bool(a.values) == bool(b.values) and a.tolerance == b.tolerance and _same_inputs(a, b)
    return runs and old.rerun == new.rerun and old.beside == new.beside


def _reference_again(golden: Golden, written: Written, run: bool | None, moved: bool) -> Reference:
    kept = golden.reference
    if kept.not_run:
        return Reference(not_run=f"when it was recorded they were not either: {kept.not_run}")
    if run is False:
        return Reference(not_run="it was not asked for")
    if run is None and not moved:
        return Reference()
    return reference(written.directory, written.plan, kept.inputs, kept.tolerance)


def _same_inputs(one: Reference, other: Reference) -> bool:
    a, b = one.inputs, other.inputs
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def _verify(out: str | Path, against: Any, progress: Progress) -> None:
    import bridge

    report = bridge.verify(out, against, progress=progress)
    if not report.passed:
        from bridge.show import verdict

        raise GoldenError(f"{report.out} is not near enough to its source to be a golden: {verdict(report)}")


def _change(old: Golden | None, reason: str, moves: list[Move]) -> Change:
    version = f"{old.versions.get('qbridge')} -> {__version__}" if old else __version__
    return Change(datetime.date.today().isoformat(), reason, version, tuple(lines(moves)))


def _versions(written: Written, ran: Reference) -> dict[str, str]:
    """Versions of what had a part in the bytes or in the run."""
    names = {*ALWAYS}
    if ran.values or written.plan.traced or written.plan.target == "trt":
        names |= {"torch", "transformers"}
    if written.plan.target == "trt":
        names |= {"onnx", "onnx-ir", "onnxruntime"}
    return {name: version for name, version in versions().items() if name in names}


def _notes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    shared = before.keys() & after.keys()
    found = versions_moved({name: before[name] for name in shared}, {name: after[name] for name in shared})
    return [f"versions: {', '.join(found)}"] if found else []
