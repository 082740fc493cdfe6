"""What a batch keeps for its next run, how long, and what it says of it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from bridge.core.errors import CalibrationError, WriteError
from bridge.reporting.report import Report
from bridge.workflows.batch.job import failure, outcome_of
from bridge.workflows.batch.prepare.calibrations import LOCK, calibration_file, drop_calibrations
from bridge.workflows.batch.prepare.plan import PlannedRow, unused_arguments
from bridge.workflows.batch.run import KEPT, BatchOptions, _folder
from bridge.workflows.batch.values import BELOW, DONE, FAILED, Outcome, Row


def planned(name: str, key: str, **more: str) -> PlannedRow:
    return PlannedRow(Row(name, "", "model", "hf", f"/nowhere/{name}", **more), key=key)  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("every", "left"), [(True, ["needed.safetensors"]), (False, ["needed.safetensors", "of-another-row.safetensors"])]
)
def test_calibrations_stay_until_the_rows_that_need_them_are_done(every: bool, left: list[str], tmp_path: Path) -> None:
    for key in ("needed", "done", "of-another-row"):
        calibration_file(tmp_path, key).write_text(key)
    rows = [planned("a", "needed"), planned("b", "needed"), planned("c", "done"), planned("d", "")]
    ends = {"a": DONE, "b": FAILED, "c": BELOW, "d": DONE}
    drop_calibrations(rows, {name: Outcome(name, status) for name, status in ends.items()}, tmp_path, every)
    assert names(tmp_path) == left


def test_the_folder_of_a_batch_stays_while_it_has_a_calibration(tmp_path: Path) -> None:
    work = tmp_path / ".s.json.work"
    with pytest.raises(KeyboardInterrupt) as stopped, _folder(tmp_path / "s.json", BatchOptions()) as folder:
        calibration_file(folder, "k").write_text("statistics")
        raise KeyboardInterrupt
    (note,) = stopped.value.__notes__
    assert note.startswith(KEPT) and "the same command goes on from there, resume=False (--no-resume)" in note
    assert names(work) == ["k.safetensors", LOCK]
    with _folder(tmp_path / "s.json", BatchOptions()) as folder:
        assert names(folder) == ["k.safetensors", LOCK]
        calibration_file(folder, "k").unlink()
    assert names(tmp_path) == []


def test_a_batch_that_does_not_resume_begins_without_calibrations(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), _folder(tmp_path / "s.json", BatchOptions()) as folder:
        calibration_file(folder, "k").write_text("statistics")
        raise KeyboardInterrupt
    with (
        pytest.raises(KeyboardInterrupt) as stopped,
        _folder(tmp_path / "s.json", BatchOptions(resume=False)) as folder,
    ):
        assert names(folder) == [LOCK]
        raise KeyboardInterrupt
    assert "the command without resume=False (--no-resume) goes on from there" in stopped.value.__notes__[0]
    assert names(tmp_path) == []


def test_the_folder_of_a_batch_hides_no_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the reason"), _folder(tmp_path / "s.json", BatchOptions()) as folder:
        (folder / LOCK).unlink()
        folder.rmdir()
        raise ValueError("the reason")


def test_a_summary_that_the_disk_does_not_take_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(WriteError) as told, _folder(tmp_path / "s.json", BatchOptions()):
        raise WriteError("s.json: the disk is full") from OSError(errno.ENOSPC, "No space left on device")
    assert told.value.__notes__[0].startswith(KEPT)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), CalibrationError("x")],
)
def test_the_outcome_of_a_row_says_what_is_kept(error: Exception) -> None:
    error.add_note("what is done is kept in here")
    assert failure("row", error).error.endswith("\nwhat is done is kept in here")


def test_arguments_that_no_row_uses_are_noted_once() -> None:
    rows = [planned("a", "", device="cuda", field="text"), planned("b", "", device="cuda")]
    assert unused_arguments(rows) == [f"{name} is not used: no row calibrates" for name in ("device", "field")]
    assert unused_arguments([*rows, planned("c", "key")]) == []


def test_a_row_that_failed_lint_names_the_finding() -> None:
    report = Report("out", "", "hf", "int8", 1, 1, 9, 18, {}, 1, findings=("error [scales] x.weight: no scale",))
    outcome = outcome_of("r", report)
    assert outcome.status == BELOW and outcome.error == "lint: error [scales] x.weight: no scale"
