"""A row that takes longer than its timeout is stopped as by a kill, with all that its process started; others go on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import bridge
from benchmarks.checkpoint import SMALL, make_checkpoint
from bridge.workflows.batch.engines import pool
from bridge.workflows.batch.engines.local import Local
from bridge.workflows.batch.engines.worker import Ended
from bridge.workflows.batch.manifest.read import read_manifest
from bridge.workflows.batch.prepare import calibrations
from bridge.workflows.batch.prepare import plan as planning
from bridge.workflows.batch.report import BatchReport, read_earlier
from bridge.workflows.batch.run import BatchOptions, run
from bridge.workflows.batch.values import DONE, FAILED, Event, Job, Limits, Outcome, Row
from tests.faults.struck import contents

TINY = Path("examples/models/tiny-llama").absolute()
HERE = Local(1, 16 << 30)


def hanging(tmp_path: Path, timeout: float | None) -> Job:
    """A job that never ends: it waits for who writes into its config, and nobody does."""
    os.mkfifo(tmp_path / "config.json")
    row = Row("hangs", "", str(TINY), "hf", str(tmp_path / "never"), "fp8", config=str(tmp_path / "config.json"))
    return Job("hangs", row, 1, 2, timeout=timeout)


@pytest.mark.slow
def test_a_row_that_hangs_is_stopped_and_harms_no_other(tmp_path: Path) -> None:
    well = Job("well", Row("well", "", str(TINY), "hf", str(tmp_path / "well"), "int8_wo", verify=False), 1, 1)
    late = Job("late", replace(well.row, name="late", out=str(tmp_path / "late")), 1, 0, timeout=600)
    ends = {end.name: end for end in Local(2, 1 << 30).run([hanging(tmp_path, 1.5), well, late], lambda event: None)}
    assert {name: end.status for name, end in ends.items()} == {"hangs": FAILED, "well": DONE, "late": DONE}
    hangs = ends["hangs"]
    assert hangs.kind == "TimeoutError" and "took longer than its timeout of 1.5 s" in hangs.error
    assert 1.5 <= hangs.seconds < 60
    assert not any("bridge.workflows.batch" in " ".join(child.cmdline()) for child in psutil.Process().children())


@pytest.mark.slow
def test_rows_that_wait_for_a_calibration_that_hangs_fail_with_it(tmp_path: Path) -> None:
    calibration = replace(hanging(tmp_path, 1), calibrates=str(tmp_path / "made"))
    waits = Job("waits", calibration.row, 1, 1, after=("hangs",))
    first, second = Local(1, 1 << 30).run([calibration, waits], lambda event: None)
    assert "timeout of 1 s" in first.error and "resumes" not in first.error
    assert (second.name, second.because, second.status) == ("waits", "hangs", FAILED)


@pytest.mark.slow
def test_a_row_that_is_late_goes_on_from_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "slow", SMALL | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6})
    text = '[defaults]\ntarget = "hf"\nquant = "nvfp4_wo"\nout = "{name}"\nverify = false\n[[row]]\nname = "late"\n'
    text += f'model = "slow"\ntimeout = 9_000\n[[row]]\nname = "well"\nmodel = "{TINY}"\n'
    (tmp_path / "batch.toml").write_text(text)
    real, passed = time.perf_counter, [0.0]
    monkeypatch.setattr(pool.time, "perf_counter", lambda: real() + passed[0])
    partial = tmp_path / ".late.partial"

    class Hurried:
        def begin(self, report: BatchReport) -> None: ...
        def ended(self, outcome: Outcome) -> None: ...
        def event(self, event: Event) -> None:
            if event.name == "late" and event.stage == "weights" and event.done:
                passed[0] = 10_000

    report = run(read_manifest(tmp_path / "batch.toml"), BatchOptions(workers=1), Hurried())
    assert {name: end.status for name, end in report.outcomes.items()} == {"late": FAILED, "well": DONE}
    told = json.loads((tmp_path / "batch.batch.json").read_text())["rows"][0]
    assert told["status"] == FAILED and "timeout of 9000 s" in told["error"] and told["seconds"] >= 9_000
    assert "the row resumes where it stopped" in told["error"] and (partial / "journal.jsonl").stat().st_size
    assert bridge.batch(tmp_path / "batch.toml").passed and not partial.exists()
    bridge.convert(tmp_path / "slow", "hf", "nvfp4_wo", tmp_path / "alone", verify=False)
    assert contents(tmp_path / "late") == contents(tmp_path / "alone")


def test_a_job_that_ended_while_nobody_looked_is_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("ends", Row("ends", "", str(TINY), "hf", str(tmp_path / "out")), 1, 1, timeout=9_000)
    workers, worker = pool.Pool(), pool.Worker()
    theirs_ended, workers._workers = worker.connection, [worker]
    worker.connection, theirs = multiprocessing.Pipe()
    worker.start(job, ())
    theirs.send(Event("ends", "plan"))
    theirs.send(Ended(Outcome("ends", DONE), 0))
    late = time.perf_counter() + 10_000
    monkeypatch.setattr(pool.time, "perf_counter", lambda: late)
    assert list(workers.messages()) == [Event("ends", "plan"), Outcome("ends", DONE)]
    assert worker.alive and workers.idle == [worker]

    worker.start(job, ())
    monkeypatch.setattr(pool.time, "perf_counter", lambda: late + 10_000)
    theirs.send(Event("ends", "plan"))
    theirs.send(Event("ends", "write"))
    *events, end = workers.messages()
    assert events == [Event("ends", "plan"), Event("ends", "write")] and isinstance(end, Outcome)
    assert end.kind == "TimeoutError" and not worker.alive and not workers.busy
    theirs_ended.close()


def test_what_a_worker_starts_while_it_is_stopped_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a chain of processes starts the next; one more is there after each look."""
    chain = "import os, time\nfor n in range(60):\n    if os.fork(): time.sleep(60)\n    time.sleep(0.5)"
    worker = pool.Worker()
    worker.process.kill()
    worker.process.wait()
    worker.process = subprocess.Popen([sys.executable, "-c", chain], start_new_session=True)
    family, looks = pool._family, list[int]()

    def looked(pid: int) -> dict[int, bytes]:
        found = family(pid)
        while not looks and len(family(pid)) == len(found):
            time.sleep(0.01)
        looks.append(len(found))
        return found

    monkeypatch.setattr(pool, "_family", looked)
    try:
        worker.kill()
        worker.close()
        assert looks[-1] > looks[0]
        until = time.monotonic() + 20
        while (left := living(worker.process.pid)) and time.monotonic() < until:
            time.sleep(0.05)
        assert left == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)


def living(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(one.pid) == session and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


@pytest.mark.slow
def test_what_a_worker_started_ends_with_it() -> None:
    worker = pool.Worker()
    worker.process.kill()
    worker.process.wait()
    nap = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    nest = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {nap!r}])"
    worker.process = subprocess.Popen([sys.executable, "-c", nest])
    parent = psutil.Process(worker.process.pid)
    until = time.monotonic() + 60
    while len(family := parent.children(recursive=True)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    worker.kill()
    worker.close()
    assert len(family) == 2 and psutil.wait_procs(family, timeout=20)[1] == []


@pytest.mark.slow
def test_a_shared_calibration_has_the_longest_timeout_of_its_rows(tmp_path: Path) -> None:
    def timeouts(*lines: str) -> list[float | None]:
        text = f'[defaults]\nmodel = "{TINY}"\nquant = "fp8"\nout = "{{name}}"\n'
        text += "".join(f'[[row]]\nname = "{n}"\ntarget = "hf"\n{line}\n' for n, line in enumerate(lines))
        (tmp_path / "batch.toml").write_text(text)
        planned = planning.plan_rows(read_manifest(tmp_path / "batch.toml").rows, HERE)
        return [job.timeout for job in calibrations.make_jobs(planned, tmp_path, None)]

    assert timeouts("timeout = 2.5", "timeout = 7") == [7, 2.5, 7]
    assert timeouts("timeout = 2.5", "") == [None, 2.5, None]


def test_a_dead_tries_last_word_does_not_start_the_clock_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next try waits for a node for longer than the row may run, then ends at once."""
    pytest.importorskip("ray")
    from bridge.workflows.batch.engines.ray import calls as ray_calls
    from bridge.workflows.batch.engines.ray import engine as engine_of_ray

    now, board = [0.0], [Event("slow", "weights", 1, 2)]

    class Waits:
        """Calls of which the first dies before its words are taken; the second answers after three looks."""

        def __init__(self, retries: int, again: Callable[[str], None]) -> None:
            self.again, self.looks = again, 0

        def start(self, *_: Any, **resources: float) -> None: ...
        def stop(self, key: str) -> None: ...
        def close(self) -> None: ...

        def ended(self) -> Iterator[ray_calls.Ended]:
            self.looks += 1
            if self.looks == 1:
                self.again("slow")
            if self.looks == 3:
                yield ray_calls.Ended("slow", Outcome("slow", DONE), attempts=2)
            now[0] += 60

    def taken(_: Any) -> list[Event]:
        found, board[:] = list(board), []
        return found

    monkeypatch.setattr(engine_of_ray, "_cluster", lambda *_: nullcontext())
    monkeypatch.setattr(engine_of_ray, "_taken", taken)
    monkeypatch.setattr(engine_of_ray.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_calls, "Calls", Waits)
    monkeypatch.setattr("ray.remote", lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=object)))
    heard: list[Event] = []
    slow = Job("slow", Row("slow", "", "model", "hf", "out", timeout=30), 1, 1)
    (end,) = engine_of_ray.Ray(engine_of_ray.Settings(), Limits(), 1, 1 << 30, True).run([slow], heard.append)
    assert end == Outcome("slow", DONE, attempts=2)
    assert [event.stage for event in heard] == ["weights", "again: its process died"]


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "true", '"1h"'])
def test_a_timeout_is_seconds(value: str, tmp_path: Path) -> None:
    (tmp_path / "batch.toml").write_text(f'[[row]]\nmodel = "llama"\ntarget = "hf"\ntimeout = {value}\n')
    with pytest.raises(bridge.BridgeError, match=r"timeout = .*; expected seconds, more than 0"):
        read_manifest(tmp_path / "batch.toml")


def test_another_timeout_asks_for_nothing_else(tmp_path: Path) -> None:
    row = replace(hanging(tmp_path, None).row, timeout=5)
    BatchReport("", "local", 1, (row,), {"hangs": Outcome("hangs", DONE)}, summary=str(tmp_path / "s.json")).save()
    assert read_earlier(tmp_path / "s.json").outcome(replace(row, timeout=50)) == Outcome("hangs", DONE)
    assert read_earlier(tmp_path / "s.json").outcome(replace(row, kv="fp8")) is None
