"""Rows of a manifest that are chains."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import bridge
from bridge.core.errors import UsageError
from bridge.workflows.batch.job import CRASH
from bridge.workflows.batch.manifest.read import read_manifest
from bridge.workflows.batch.run import BatchOptions, run
from bridge.workflows.batch.values import DONE, FAILED, PLANNED, Event
from tests.workflows.batch.test_manifest import refused
from tests.workflows.batch.test_run import Spectator, workers_of
from tests.workflows.batch.test_run import written as manifest
from tests.workflows.chain.test_chain import CHAIN, LLAMA
from tests.workflows.chain.test_chain import written as chain

PLAIN = f'[[row]]\nname = "plain"\nmodel = "{LLAMA}"\ntarget = "hf"\nquant = "int8_wo"\n'
ROWS = f'[defaults]\nout = "out/{{name}}"\n[[row]]\nname = "small"\nchain = "chain.toml"\n{PLAIN}'
PRUNED = CHAIN.partition('[[step]]\nname    = "trained"')[0]


@pytest.mark.slow
def test_a_chain_that_was_killed_in_its_second_step_keeps_the_first(tmp_path: Path) -> None:
    chain(tmp_path, CHAIN.replace("steps   = 6", "steps = 16"))
    path = manifest(tmp_path, ROWS)

    def kill(event: Event) -> None:
        if event.name == "small" and event.stage == "trained: train" and event.done >= 4:
            for worker in workers_of(os.getpid()):
                worker.kill()

    first = run(read_manifest(path), BatchOptions(workers=1), Spectator(kill))
    assert (first.outcomes["small"].status, first.outcomes["small"].kind) == (FAILED, CRASH)
    assert first.outcomes["plain"].status == DONE
    assert sorted(path.name for path in (tmp_path / "out/small").iterdir()) == [
        ".trained.distill",
        ".trained.step.json",
        "pruned",
    ]
    pruned = (tmp_path / "out/small/pruned/model.safetensors").stat().st_mtime_ns
    seen = Spectator()
    again = run(read_manifest(path), BatchOptions(workers=1), seen)
    small = again.outcomes["small"]
    assert small.status == DONE and not small.kept and again.outcomes["plain"].kept
    assert (tmp_path / "out/small/pruned/model.safetensors").stat().st_mtime_ns == pruned
    trained = [event.done for event in seen.events if event.stage == "trained: train" and event.done]
    assert trained[0] > 2 and not [event for event in seen.events if event.stage.startswith("pruned")]
    report = json.loads((tmp_path / "out/small/coded/report.json").read_text())
    assert (small.bytes, small.tensors, small.plan_digest) == (
        report["bytes"], report["tensors"], report["plan_digest"],
    )  # fmt: skip
    last = bridge.batch(path)
    assert (last.outcomes["small"].kept and last.passed and "small: done" in str(last).lower()) or last.passed
    chain(tmp_path, CHAIN.replace("steps   = 6", "steps = 16").replace("int8_wo", "fp8"))
    dry = bridge.batch(path, dry_run=True)
    assert (dry.outcomes["small"].status, dry.outcomes["plain"].status) == (PLANNED, DONE)


@pytest.mark.slow
def test_a_step_that_fails_fails_its_row_with_its_name(tmp_path: Path) -> None:
    chain(tmp_path, PRUNED)
    path = manifest(tmp_path, f"strict = false\n{ROWS}")
    (tmp_path / "out/small/pruned").mkdir(parents=True)
    (tmp_path / "out/small/pruned/mine.txt").write_text("")
    report = bridge.batch(path, workers=1)
    small = report.outcomes["small"]
    assert small.status == FAILED and "step pruned of this chain did not make it" in small.error
    assert report.outcomes["plain"].status == DONE


def test_a_chain_is_read_with_the_manifest(tmp_path: Path) -> None:
    chain(tmp_path, CHAIN.replace("lr      = 1e-3", 'device = "cpu"'))
    rows = read_manifest(manifest(tmp_path, ROWS + '[[row]]\nchain = "chain.toml"\ntimeout = 5\n')).rows
    named, unnamed = rows[0], rows[2]
    assert (named.chain, named.out) == (str(tmp_path / "chain.toml"), str(tmp_path / "out/small"))
    assert (named.model, named.target, named.device) == ("", "", "cpu")
    assert (unnamed.name, unnamed.out, unnamed.timeout) == ("chain", str(tmp_path / "out/chain"), 5)
    assert read_manifest(manifest(tmp_path, '[[matrix]]\nchain = ["chain.toml"]\n')).rows[0].name == "chain"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('[[row]]\nchain = "gone.toml"', "no chain of steps can be read from it"),
        ("[[row]]\nchain = 3", "chain = 3; expected a text in quotes"),
        (
            f'[[row]]\nchain = "chain.toml"\nmodel = "{LLAMA}"\ntp = 2',
            "model, tp: a row with `chain` has name",
        ),
        ('[[row]]\nchain = "chain.toml"\nout = "s3://bucket/x"', "a chain goes on from outputs on this machine"),
        ('[[row]]\nchain = "chain.toml"\nout = "{model}"', "unknown row key {model}"),
        ('[[row]]\nchain = "chain.toml"\n[[row]]\nchain = "chain.toml"', "already has the name 'chain'"),
        (
            '[[row]]\nchain = "chain.toml"\nout = "x"\n[[row]]\nmodel = "x/coded"\ntarget = "hf"\nout = "y"',
            "is the output of 'chain'",
        ),
    ],
)
def test_what_is_wrong_with_a_chain_is_told_with_the_manifest(rows: str, said: str, tmp_path: Path) -> None:
    chain(tmp_path, CHAIN)
    (tmp_path / "x/coded").mkdir(parents=True)
    lines = refused(tmp_path, f"{rows}\n{PLAIN}quant2 = 3\n")
    assert any(said in line for line in lines), lines
    assert any("`quant2` is unknown" in line for line in lines)


def test_a_bad_chain_is_told_with_the_other_problems_before_work(tmp_path: Path) -> None:
    chain(tmp_path, CHAIN.replace('verb = "prune"', 'verb = "shrink"').replace("steps   = 6", "steeps = 6"))
    with pytest.raises(UsageError) as raised:
        bridge.batch(manifest(tmp_path, ROWS.replace("int8_wo", "int9")))
    told = str(raised.value)
    assert "2 problems" in told and "quant='int9' is unknown" in told
    assert "[[row]] 1: " in told and "verb = 'shrink'" in told and "`steeps` is no argument of distill" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.toml", "chain.toml"]


@pytest.mark.slow
def test_what_headers_tell_of_a_chain_is_told_when_rows_are_planned(tmp_path: Path) -> None:
    chain(tmp_path, CHAIN.replace("steps   = 6", "steps = 0"))
    report = bridge.batch(manifest(tmp_path, ROWS), dry_run=True)
    assert report.outcomes["small"].status == FAILED and "step trained: steps=0" in report.outcomes["small"].error
    chain(tmp_path, CHAIN)
    planned = bridge.batch(manifest(tmp_path, ROWS), dry_run=True).outcomes["small"]
    assert planned.status == PLANNED and planned.peak_memory > 1 << 30 and planned.bytes > 1 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.toml", "chain.toml"]
