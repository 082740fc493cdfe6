"""A batch is its rows, each converted alone: same bytes, whatever fails, dies or is stopped beside them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.core.errors import BatchError, UsageError, WriteError
from bridge.workflows.batch.manifest.read import read_manifest
from bridge.workflows.batch.observers import Lines
from bridge.workflows.batch.report import BatchReport
from bridge.workflows.batch.run import BatchOptions, run
from bridge.workflows.batch.values import BELOW, DONE, FAILED, PLANNED, Event, Outcome
from tests.covering import usual
from tests.faults.struck import contents

TINY = Path("examples/models/tiny-llama").absolute()


class Spectator:
    """Keeps what it is told, and may act on an event."""

    def __init__(self, act: Callable[[Event], None] = lambda event: None) -> None:
        self.events: list[Event] = []
        self.outcomes: list[Outcome] = []
        self.act = act

    def begin(self, report: BatchReport) -> None:
        self.outcomes += report.outcomes.values()

    def event(self, event: Event) -> None:
        self.events.append(event)
        self.act(event)

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "batch.toml"
    path.write_text(text)
    return path


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob(".*"))


def rows(*quants: str, more: str = "") -> str:
    head = f'[defaults]\nmodel = "{TINY}"\ntarget = "hf"\n{more}\n'
    return head + "".join(f'[[row]]\nname = "{quant}"\nout = "{quant}"\nquant = "{quant}"\n' for quant in quants)


def summary(tmp_path: Path) -> tuple[bool, list[str]]:
    told = json.loads((tmp_path / "batch.batch.json").read_text())
    return told["passed"], [row["status"] for row in told["rows"]]


def statuses(report: BatchReport) -> dict[str, str]:
    return {name: outcome.status for name, outcome in report.outcomes.items()}


@pytest.mark.slow
def test_rows_are_what_convert_writes_and_tell_the_same(tmp_path: Path) -> None:
    report = bridge.batch(written(tmp_path, rows("int8_wo", "int4_wo", "nvfp4_wo")), workers=2)
    assert statuses(report) == {"int8_wo": DONE, "int4_wo": DONE, "nvfp4_wo": DONE} and report.passed
    for quant, outcome in report.outcomes.items():
        alone = bridge.convert(TINY, "hf", quant, tmp_path / "alone" / quant)
        assert contents(tmp_path / quant) == contents(tmp_path / "alone" / quant)
        assert alone.parity
        told = (outcome.bytes, outcome.tensors, outcome.plan_digest, outcome.cosine)
        assert told == (alone.bytes, alone.tensors, alone.plan_digest, min(t.cosine for t in alone.parity.tensors))
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_row_that_fails_harms_no_other(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(TINY, broken)
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in sorted(tensors) if "down_proj" in name)
    save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, broken / "model.safetensors", {"format": "pt"})
    text = rows("int8_wo", "int4_wo") + '[[row]]\nname = "nan"\nmodel = "broken"\nquant = "int8_wo"\n'
    text += '[[row]]\nname = "gone"\nmodel = "./nowhere"\nquant = "int8_wo"\n'
    report = bridge.batch(written(tmp_path, text))
    assert statuses(report) == {"int8_wo": DONE, "int4_wo": DONE, "nan": FAILED, "gone": FAILED}
    assert (report.outcomes["nan"].kind, report.outcomes["gone"].kind) == ("SourceError", "SourceError")
    assert name in report.outcomes["nan"].error and "no such directory" in report.outcomes["gone"].error
    assert not (tmp_path / "nan").exists() and leftovers(tmp_path) == []
    told = json.loads((tmp_path / "batch.batch.json").read_text())
    assert told["passed"] is False and [row["status"] for row in told["rows"]] == [DONE, DONE, FAILED, FAILED]


@pytest.mark.slow
def test_strict_runs_nothing_where_one_row_cannot_run(tmp_path: Path) -> None:
    text = "strict = true\n" + rows("int8_wo") + '[[row]]\nname = "gone"\nmodel = "./nowhere"\n'
    with pytest.raises(BatchError, match=r"(?s)1 row cannot run.*gone: .*no such directory"):
        bridge.batch(written(tmp_path, text))
    assert not (tmp_path / "int8_wo").exists()
    assert statuses(bridge.batch(tmp_path / "batch.toml", strict=False))["int8_wo"] == DONE


@pytest.mark.slow
def test_finished_rows_are_kept_and_changed_ones_are_not(tmp_path: Path) -> None:
    manifest = written(tmp_path, rows("int8_wo", "int4_wo"))
    bridge.batch(manifest)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    again = bridge.batch(manifest)
    assert all(outcome.kept for outcome in again.outcomes.values()) and again.passed
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before
    written(tmp_path, rows("int8_wo", "int4_wo", more='format = "compressed-tensors"'))
    changed = bridge.batch(manifest)
    assert [outcome.kind for outcome in changed.outcomes.values()] == ["WriteError"] * 2
    written(tmp_path, rows("int8_wo", "int4_wo", more='format = "compressed-tensors"\noverwrite = true'))
    assert [outcome.kept for outcome in bridge.batch(manifest).outcomes.values()] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["model.safetensors", "tokenizer.json"])
def test_an_output_that_lost_a_file_is_not_a_finished_row(damage: str, tmp_path: Path) -> None:
    manifest = written(tmp_path, rows("int8_wo", more="overwrite = true"))
    bridge.batch(manifest)
    whole = contents(tmp_path / "int8_wo")
    (tmp_path / "int8_wo" / damage).unlink()
    assert not bridge.batch(manifest).outcomes["int8_wo"].kept
    assert contents(tmp_path / "int8_wo") == whole


def test_a_dry_run_plans_and_writes_nothing(tmp_path: Path) -> None:
    manifest = written(tmp_path, rows("int8_wo", "fp8"))
    report = bridge.batch(manifest, dry_run=True)
    assert statuses(report) == {"int8_wo": PLANNED, "fp8": PLANNED}
    plan, said = bridge.plan(TINY, "hf", "fp8"), report.outcomes["fp8"]
    assert (said.plan_digest, said.bytes) == (plan.digest, plan.disk) and not report.passed
    assert [path.name for path in tmp_path.iterdir()] == ["batch.toml"]


@pytest.mark.slow
def test_only_the_rows_that_are_asked_for_run(tmp_path: Path) -> None:
    manifest = written(tmp_path, rows("int8_wo", "int4_wo", "nvfp4_wo"))
    assert list(bridge.batch(manifest, only="int*").outcomes) == ["int8_wo", "int4_wo"]
    assert summary(tmp_path) == (False, [DONE, DONE, "not run"])
    assert bridge.batch(manifest, only="nvfp4_wo").passed
    assert summary(tmp_path) == (True, [DONE, DONE, DONE])
    written(tmp_path, rows("int8_wo", "int4_wo", "nvfp4_wo", more="verify = false"))
    bridge.batch(manifest, only="int4_wo")  # the others ask for something else than was run
    assert summary(tmp_path) == (False, ["not run", DONE, "not run"])
    with pytest.raises(UsageError, match="no row is named 'fp9'"):
        bridge.batch(manifest, only=["int8_wo", "fp9"])


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = written(tmp_path, rows("int8_wo", "fp8"))
    report = bridge.batch(manifest, memory=400 << 20)
    assert statuses(report) == {"int8_wo": DONE, "fp8": FAILED}  # calibrating takes torch and the model
    assert "419 MB at most" in report.outcomes["fp8"].error
    usage = shutil.disk_usage(tmp_path)
    one = bridge.plan(TINY, "hf", "int4_wo").disk + (1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=one))
    written(tmp_path, "strict = true\n" + rows("int4_wo", "nvfp4_wo"))
    with pytest.raises(BatchError, match=r"(?s)1 row cannot run.*nvfp4_wo: .* of disk"):
        bridge.batch(manifest)
    assert not (tmp_path / "int4_wo").exists() and leftovers(tmp_path) == []
    assert statuses(bridge.batch(manifest, strict=False)) == {"int4_wo": DONE, "nvfp4_wo": FAILED}
    assert summary(tmp_path) == (False, [DONE, FAILED])


@pytest.mark.slow
def test_jobs_share_memory(tmp_path: Path) -> None:
    """Two rows that do not fit together run one after the other, whatever the number of workers."""
    spectator = Spectator()
    manifest = read_manifest(written(tmp_path, rows("int8_wo", "int4_wo", "nvfp4_wo")))
    report = run(manifest, BatchOptions(workers=3, memory=500 << 20), spectator)
    assert report.passed
    order = [event.name for event in spectator.events]
    assert len([name for name, before in zip(order, ["", *order], strict=False) if name != before]) == 3


def test_somebody_elses_file_is_no_summary(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    with pytest.raises(WriteError, match="is not the summary of a batch"):
        bridge.batch(written(tmp_path, 'summary = "notes.json"\n' + rows("int8_wo")))
    assert (tmp_path / "notes.json").read_text() == '{"mine": 1}'


@pytest.mark.slow
def test_two_batches_of_one_manifest_do_not_mix(tmp_path: Path) -> None:
    manifest = written(tmp_path, rows("int8_wo"))
    refusals: list[str] = []

    def second(event: Event) -> None:
        if not refusals:
            with pytest.raises(WriteError, match="another process runs this batch") as caught:
                bridge.batch(manifest)
            refusals.append(str(caught.value))

    assert run(read_manifest(manifest), BatchOptions(), Spectator(second)).passed and refusals


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    """Workers are no forks and do not import the caller's script."""
    manifest = written(tmp_path, rows("int8_wo", "int4_wo"))
    script = tmp_path / "script.py"
    script.write_text(f"import bridge\nprint('once')\nprint(bridge.batch({str(manifest)!r}, workers=2).passed)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["once", "True"]


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose conversion takes long enough to be killed in the middle."""
    from benchmarks.checkpoint import SMALL, make_checkpoint

    root = tmp_path_factory.mktemp("slow") / "slow"
    make_checkpoint(root, SMALL | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6})
    return root


@pytest.fixture(scope="module")
def alone(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    """What converting it alone with a scheme writes."""

    def made(quant: str) -> dict[str, bytes]:
        out = tmp_path_factory.mktemp("alone") / quant
        bridge.convert(slow_model, "hf", quant, out, verify=False)
        return contents(out)

    return functools.cache(made)


def workers_of(process: int) -> list[psutil.Process]:
    children = psutil.Process(process).children()
    return [child for child in children if "bridge.workflows.batch.engines.worker" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_a_worker_that_dies_is_one_failed_row_that_resumes(
    slow_model: Path, alone: Callable[[str], dict[str, bytes]], tmp_path: Path
) -> None:
    row = f'[[row]]\nname = "dies"\nmodel = "{slow_model}"\nquant = "nvfp4_wo"\nverify = false\n'
    text = rows("int8_wo", "int4_wo") + row
    manifest = read_manifest(written(tmp_path, text))

    def kill(event: Event) -> None:
        if event.name == "dies" and event.stage == "weights" and event.done < event.total:
            for worker in workers_of(os.getpid()):
                worker.kill()

    report = run(manifest, BatchOptions(workers=1), Spectator(kill))
    assert statuses(report) == {"int8_wo": DONE, "int4_wo": DONE, "dies": FAILED}
    assert report.outcomes["dies"].kind == "Crash" and "SIGKILL" in report.outcomes["dies"].error
    assert leftovers(tmp_path) == [".dies.partial"]
    assert bridge.batch(tmp_path / "batch.toml").passed
    assert contents(tmp_path / "dies") == alone("nvfp4_wo") and leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", usual([signal.SIGKILL, signal.SIGINT], [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
)
def test_a_batch_that_is_stopped_leaves_no_worker_and_goes_on(
    number: signal.Signals, slow_model: Path, alone: Callable[[str], dict[str, bytes]], tmp_path: Path
) -> None:
    text = f'[[matrix]]\nmodel = "{slow_model}"\ntarget = "hf"\nquant = ["nvfp4_wo", "int4_wo"]\nverify = false\n'
    manifest = written(tmp_path, text)
    command = [sys.executable, "-m", "bridge", "batch", str(manifest), "--workers", "2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        partial = [tmp_path / f".slow-{quant}-hf.partial" for quant in ("nvfp4_wo", "int4_wo")]
        while not any((path / "model.safetensors").exists() for path in partial) and process.poll() is None:
            time.sleep(0.002)
        children = workers_of(process.pid)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # a terminal sends Ctrl-C to all
        else:
            process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        assert children
        assert psutil.wait_procs(children, timeout=20)[1] == []
    finally:
        process.kill()
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number and "the same command goes on from there" in said
    assert bridge.batch(manifest, workers=2).passed
    for quant in ("nvfp4_wo", "int4_wo"):
        assert contents(tmp_path / f"slow-{quant}-hf") == alone(quant)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_the_command_says_how_rows_ended_by_its_exit_code(tmp_path: Path) -> None:
    recipe = tmp_path / "strict.toml"
    gate = "{ cosine = 0.9999999, norm = [0.999999, 1.000001] }"
    recipe.write_text(f'base = "int8_wo"\n[parity]\ntensor = {gate}\noutput = {gate}\n')

    def code(text: str, *more: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "bridge", "batch", str(written(tmp_path, text)), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    below = f'[[row]]\nname = "below"\nmodel = "{TINY}"\ntarget = "hf"\nquant = "strict.toml"\n'
    assert code(rows("int8_wo"))[0] == 0
    returned, said = code(rows("int8_wo") + below, "--json")
    assert returned == 3 and json.loads(said)["rows"][1]["status"] == BELOW
    assert code(rows("int8_wo") + below + '[[row]]\nname = "gone"\nmodel = "./nowhere"\n')[0] == 1
    assert code("[[row]]\n")[0] == 2
    assert code(rows("int4_wo"), "--dry-run")[0] == 0 and not (tmp_path / "int4_wo").exists()


@pytest.mark.slow
def test_a_long_row_tells_every_half_minute_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said, now = list[str](), [0.0]
    monkeypatch.setattr("bridge.workflows.batch.observers.time.monotonic", lambda: now[0])
    lines = Lines(said.append)
    for at, event in (
        (0, Event("a", "plan")), (1, Event("a", "calibrate", 1, 100)), (29, Event("a", "calibrate", 20, 100)),
        (31, Event("a", "calibrate", 21, 100)), (40, Event("a", "weights", 1 << 20, 2 << 20)),
        (62, Event("a", "weights", 3 << 19, 2 << 20)),
    ):  # fmt: skip
        now[0] = at
        lines.event(event)
    assert [line.partition(" s  ")[2] for line in said] == [
        "a: started",
        "a: calibrate 21%",
        "a: weights 1.57 MB of 2.1 MB",
    ]


def test_one_calibration_serves_all_targets_and_changes_nothing(tmp_path: Path) -> None:
    """Weights, config and calibration are those of `convert` alone, and outputs are compared as it does."""
    text = f'[[matrix]]\nmodel = "{TINY}"\ntarget = ["hf", "tripy", "trtllm"]\nquant = "fp8"\n'
    spectator = Spectator()
    report = run(read_manifest(written(tmp_path, text)), BatchOptions(workers=2), spectator)
    assert report.passed, [outcome.error for outcome in report.outcomes.values()]
    assert [outcome.status for outcome in report.calibrations] == [DONE]
    assert sum(event.stage == "calibrate" and 0 < event.done == event.total for event in spectator.events) == 1
    for target in ("hf", "tripy", "trtllm"):
        alone: Any = bridge.convert(TINY, target, "fp8", tmp_path / "alone" / target)
        out = tmp_path / f"tiny-llama-fp8-{target}"
        assert contents(out) == contents(tmp_path / "alone" / target)
        told = json.loads((out / "report.json").read_text())["parity"]
        assert json.loads(alone.to_json())["parity"] == told
    again = bridge.batch(tmp_path / "batch.toml")
    assert all(outcome.kept for outcome in again.outcomes.values()) and not again.calibrations
    shutil.rmtree(tmp_path / "tiny-llama-fp8-tripy")
    one = bridge.batch(tmp_path / "batch.toml")  # the statistics lie in the outputs that are there
    assert one.passed and not one.calibrations
    assert contents(tmp_path / "tiny-llama-fp8-tripy") == contents(tmp_path / "alone" / "tripy")
