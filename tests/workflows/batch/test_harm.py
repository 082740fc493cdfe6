"""What is wrong with one row, its output or its process is that row's outcome: never the end of a batch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import bridge
from bridge.cli.flags import in_flags
from bridge.cli.main import app
from bridge.cli.terminal import console
from bridge.core.errors import CalibrationError, PlanError
from bridge.quant.calibration import Calibration, Provenance
from bridge.reporting.report import Report
from bridge.verification.parity import Parity, TensorParity
from bridge.workflows.batch import report as result
from bridge.workflows.batch.engines import pool
from bridge.workflows.batch.engines.local import Local
from bridge.workflows.batch.engines.queue import JobQueue
from bridge.workflows.batch.job import CRASH, outcome_of, request_of, run_job
from bridge.workflows.batch.manifest.read import read_manifest
from bridge.workflows.batch.prepare import calibrations, outputs
from bridge.workflows.batch.prepare import plan as planning
from bridge.workflows.batch.report import BatchReport, report_table
from bridge.workflows.batch.values import BELOW, DONE, FAILED, PLANNED, Job, Outcome, Row, line

TINY = Path("examples/models/tiny-llama").absolute()
HERE = Local(1, 16 << 30)


def written(tmp_path: Path, *quants: str, more: str = "") -> Path:
    text = f'[defaults]\nmodel = "{TINY}"\ntarget = "hf"\n{more}\n'
    path = tmp_path / "batch.toml"
    path.write_text(text + "".join(f'[[row]]\nname = "{q}"\nout = "{q}"\nquant = "{q}"\n' for q in quants))
    return path


def job(name: str, **more: Any) -> Job:
    return Job(name, Row(name, "", str(TINY), "hf", f"/nowhere/{name}"), 1, 1, **more)


@pytest.mark.parametrize("text", ["[]", '"x"', "[" * 5000 + "]" * 5000, '{"plan_digest": 1}', "\xff"])
def test_a_damaged_report_is_no_finished_row(text: str, tmp_path: Path) -> None:
    (tmp_path / "int8_wo").mkdir()
    (tmp_path / "int8_wo" / "report.json").write_bytes(text.encode("latin1"))
    report = bridge.batch(written(tmp_path, "int8_wo", "int4_wo"), dry_run=True)
    assert [outcome.status for outcome in report.outcomes.values()] == [FAILED, PLANNED]
    told = report.outcomes["int8_wo"].error
    assert "exists already; choose another directory, or set `overwrite = true` in the row or in [defaults]" in told


def test_a_journal_that_is_no_text_fails_its_row(tmp_path: Path) -> None:
    (tmp_path / "int8_wo").mkdir()
    (tmp_path / "int8_wo" / "bridge.json").write_text("{}")
    (tmp_path / "int8_wo" / "journal.jsonl").write_bytes(b"\xff\xfe\n")
    report = bridge.batch(written(tmp_path, "int8_wo"))
    assert [outcome.status for outcome in report.outcomes.values()] == [FAILED]


def test_a_name_too_long_for_the_disk_fails_its_row(tmp_path: Path) -> None:
    path = written(tmp_path, "int8_wo")
    path.write_text(path.read_text() + f'[[row]]\nname = "long"\nout = "{"x" * 300}"\nquant = "int8_wo"\n')
    report = bridge.batch(path, dry_run=True)
    assert [outcome.status for outcome in report.outcomes.values()] == [PLANNED, FAILED]
    assert "too long" in report.outcomes["long"].error


def test_a_bug_while_a_row_is_planned_costs_that_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planning.resolve_ahead

    def broken(source: Any, request: Any, here: bool) -> Any:
        if request.quant == "int8_wo":
            raise KeyError("bug")
        return plan(source, request, here)

    monkeypatch.setattr(planning, "resolve_ahead", broken)
    report = bridge.batch(written(tmp_path, "int8_wo", "int4_wo"), dry_run=True)
    assert [outcome.status for outcome in report.outcomes.values()] == [FAILED, PLANNED]
    assert report.outcomes["int8_wo"].kind == CRASH and "unexpected KeyError: a bug" in report.outcomes["int8_wo"].error


def test_data_that_are_missing_are_told_before_anything_runs(tmp_path: Path) -> None:
    report = bridge.batch(written(tmp_path, "int8_wo", "fp8", more='calib = "gone.txt"'), dry_run=True)
    assert [outcome.status for outcome in report.outcomes.values()] == [PLANNED, FAILED]
    assert "gone.txt" in report.outcomes["fp8"].error


def test_a_worker_that_cannot_start_is_the_outcome_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **more: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    jobs = [job("calibration", calibrates="x"), job("a", after=("calibration",)), job("b")]
    ends = list(Local(1, 1 << 30).run(jobs, lambda event: None))
    assert [(end.name, end.status) for end in ends] == [("calibration", FAILED), ("a", FAILED), ("b", FAILED)]
    assert "cannot be started: " in ends[2].error and "Too many open files" in ends[2].error
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("number", [11, 36])
def test_a_signal_is_named_and_the_list_of_modules_left_out(number: int) -> None:
    worker = pool.Worker()
    worker.process.kill()
    worker.process.wait()
    worker.process.returncode = -number
    worker.stderr.write(b"Fatal Python error\nExtension modules: numpy, torch (total: 2)\n")
    told = worker._died(job("row"))
    worker.close()
    assert ("SIGSEGV" if number == 11 else "signal 36") in told.error
    assert "Fatal Python error" in told.error and "Extension modules" not in told.error


@pytest.mark.slow
def test_a_worker_gets_no_interrupt_before_it_can_refuse_one() -> None:
    """Ctrl-C goes to all processes of a terminal: one whose Python starts just then would end with a traceback."""
    worker = pool.Worker()
    worker.process.send_signal(signal.SIGINT)
    worker.connection.send(None)
    assert worker.process.wait(60) == 0
    worker.stderr.seek(0)
    assert b"Traceback" not in worker.stderr.read()
    worker.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_calibration_that_fails_is_told_once_and_not_counted_as_made() -> None:
    jobs = [job("the calibration", calibrates="x"), job("a", after=("the calibration",))]
    waiting = JobQueue(jobs)
    waiting.take(jobs[0])
    first, row = waiting.ended(Outcome("the calibration", FAILED, "no data, and much more", "CalibrationError"))
    report = BatchReport("", "local", 1, (jobs[1].row,), {"a": row}, (first,))
    with Path("/dev/null").open("w") as nowhere:
        screen = console(nowhere)
        with screen.capture() as captured:
            screen.print(report_table(report))
    said = captured.get()
    assert said.count("no data, and much more") == 1
    assert "1 row: 1 failed, 1 calibration failed;" in said
    assert line(row) == "a: FAILED: the calibration failed"


def test_a_batch_has_passed_when_every_row_has() -> None:
    rows = (job("a").row, job("b").row)
    report = BatchReport("", "local", 1, rows)
    assert not report.passed
    assert not replace(report, outcomes={"a": Outcome("a", DONE)}).passed
    assert replace(report, outcomes={"a": Outcome("a", DONE), "b": Outcome("b", DONE)}).passed


def test_a_summary_nested_without_end_is_no_summary(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("[" * 100_000)
    with pytest.raises(bridge.BridgeError, match="is not the summary of a batch"):
        result.read_earlier(tmp_path / "s.json")


@pytest.mark.slow
def test_a_calibration_of_another_version_of_torch_is_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read_manifest(written(tmp_path, "fp8")).rows
    now = planning.plan_rows(rows, HERE)[0]
    assert now.key and now.key == planning.plan_rows(rows, HERE)[0].key
    monkeypatch.setattr(planning, "versions", lambda: {"torch": "0.1"})
    assert planning.plan_rows(rows, HERE)[0].key != now.key


@pytest.mark.parametrize(("data", "torch", "same"), [("d", "2", True), ("e", "2", False), ("d", "1", False)])
def test_without_a_summary_the_calibration_in_the_output_decides(
    data: str, torch: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "versions", lambda: {"torch": "2"})
    file = tmp_path / "calibration.safetensors"
    Calibration(Provenance("fp8", "s", "", "", "", data, 1, 1, {"torch": torch})).save(file)
    planned = planning.PlannedRow(job("row").row, key="k", statistics=("s", "d"))
    assert outputs._same_calibration(planned, {}, file) is same
    assert not outputs._same_calibration(planned, {"k": "another"}, file)


@pytest.mark.slow
def test_data_and_how_rows_are_cut_from_it_reach_the_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [{"text": f"{n} words that are not mine", "mine": f"{n} words to calibrate with"} for n in range(1000)]
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in texts))

    def planned(more: str) -> planning.PlannedRow:
        (one,) = planning.plan_rows(read_manifest(written(tmp_path, "fp8", more=more)).rows, HERE)
        assert not one.failed, one.failed
        return one

    keys = ['data = "mine.jsonl"', 'field = "mine"', "samples = 4", "sequence = 64", 'compute = "fp32"']
    sets = ["", 'samples = "auto"', *("\n".join(keys[: n + 1]) for n in range(5))]
    assert len({planned(more).key for more in sets}) == 7  # each is another calibration
    calibrating, converting = calibrations.make_jobs([planned("\n".join(keys))], tmp_path, None)
    assert converting.row.data is None and converting.row.calib == calibrating.calibrates
    given: dict[str, Any] = {}

    def calibrate(model: Any, quant: Any, data: Any, **more: Any) -> Any:
        given.update(more, data=data)
        raise CalibrationError("enough")

    monkeypatch.setattr("bridge.workflows.batch.job.calibrate", calibrate)
    assert run_job(calibrating, lambda event: None).error == "enough"
    expected = {"data": str(tmp_path / "mine.jsonl"), "field": "mine", "samples": 4, "sequence": 64, "compute": "fp32"}
    assert given | expected == given


def test_a_row_has_a_gate_of_its_own(tmp_path: Path) -> None:
    (one,) = planning.plan_rows(read_manifest(written(tmp_path, "fp8", more='gate = "kl=0.2"')).rows, HERE)
    assert not one.failed and request_of(one.row).gate == "kl=0.2"
    (one,) = planning.plan_rows(read_manifest(written(tmp_path, "fp8", more='gate = "norm"')).rows, HERE)
    assert one.failed and "gate='norm' (--gate) is unknown; known: cosine, and kl=0.1" in one.failed.error


def test_a_row_with_a_calibration_and_data_is_refused(tmp_path: Path) -> None:
    more = 'calib = "c.safetensors"\ndata = "mine.txt"'
    (one,) = planning.plan_rows(read_manifest(written(tmp_path, "fp8", more=more)).rows, HERE)
    assert one.failed and "give one of them" in one.failed.error


def test_a_row_that_failed_parity_names_the_gate(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple(Row(f"r{n}", "", "m", "hf", f"out{n}") for n in range(8))
    parity = Parity(
        (TensorParity("layers.0.up.weight", "int8", 0.9, 1.0, 9.0, 0.4, False, "cosine 0.9, its gate is 0.99", 0.99),)
    )
    ended = outcome_of("r0", Report("out0", "", "hf", "int8", 1, 1, 9, 18, {}, 1, parity))
    assert (ended.status, ended.kind) == (BELOW, "") and "layers.0.up.weight: " in ended.error
    report = BatchReport("", "local", 1, rows, {row.name: replace(ended, name=row.name) for row in rows})
    assert report.lines()[1].startswith("r0: FAILED parity in 0.0 s, 9 B: layers.0.up.weight")
    assert len(report.lines()) == 7 and report.lines()[-1] == "and 3 more failures"
    console(sys.stdout).print(report)
    said = capsys.readouterr().out
    assert "FAILED parity" in said and "r7: layers.0.up.weight" in said and "8 rows: 8 failed parity" in said


def test_a_quiet_command_tells_all_lines_of_an_error(tmp_path: Path) -> None:
    path = written(tmp_path)
    row = f'[[row]]\nname = "odd"\nmodel = "{TINY}"\ntarget = "trtllm"\nquant = "int8_wo"\ntp = 7\n'
    path.write_text(path.read_text() + row)
    done = CliRunner().invoke(app, ["batch", str(path), "--dry-run", "-q"])
    with pytest.raises(PlanError) as error:
        bridge.plan(TINY, "trtllm", "int8_wo", tp=7)
    lines = in_flags(str(error.value)).splitlines()
    assert len(lines) > 1 and done.exit_code == 1 and [line for line in lines if line.strip() not in done.stderr] == []


@pytest.mark.slow
def test_a_quiet_command_tells_failures_on_stderr(tmp_path: Path) -> None:
    path = written(tmp_path, "int8_wo")
    path.write_text(path.read_text() + '[[row]]\nname = "gone"\nmodel = "./nowhere"\n')
    command = [sys.executable, "-m", "bridge", "batch", str(path), "--dry-run"]
    done = subprocess.run([*command, "-q"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "1 of 2 rows failed" in done.stderr and "gone: FAILED: SourceError: " in done.stderr
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False).stdout
    assert json.loads(told)["rows"][1]["status"] == FAILED
