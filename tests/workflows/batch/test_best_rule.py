"""Rows of int4:best: rules are measured once for a model and its data, and each row takes the best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.quant.calibration import Calibration
from bridge.targets.manifest import load_manifest
from bridge.workflows.batch.engines.local import Settings, make_engine
from bridge.workflows.batch.job import run_job
from bridge.workflows.batch.manifest.read import read_manifest
from bridge.workflows.batch.prepare.calibrations import make_jobs
from bridge.workflows.batch.prepare.plan import plan_rows
from bridge.workflows.batch.values import FAILED, PLANNED, Limits, folder_of_rules
from tests.blocks import ROOT
from tests.faults.struck import contents

TINY = ROOT / "examples" / "models" / "tiny-llama"
FEW = "samples = 4\nsequence = 32\n"
TWO = 'candidates = "imatrix,rtn"'


def written(tmp_path: Path, rows: str, defaults: str = FEW) -> Path:
    path = tmp_path / "batch.toml"
    path.write_text(f'[defaults]\nmodel = "{TINY}"\n{defaults}{rows}')
    return path


def row(name: str, quant: str = "int4:best", more: str = "", target: str = "hf") -> str:
    return f'[[row]]\nname = "{name}"\nout = "{name}"\ntarget = "{target}"\nquant = "{quant}"\n{more}\n'


@pytest.mark.slow
def test_rules_are_measured_once_for_all_rows_and_finished_rows_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = row("a", more=TWO) + row("b", "int4", f'{TWO}\nshard_size = "1MB"')
    text += row("c", target="gguf", more=f"{TWO}\nverify = false")
    manifest = written(tmp_path, text)
    report = bridge.batch(manifest, workers=1)
    assert report.passed, [outcome.error for outcome in report.outcomes.values()]
    assert len(report.calibrations) == 1 and "for int4:best" in report.calibrations[0].name
    alone = bridge.convert(
        TINY, "hf", "int4:best", tmp_path / "alone", samples=4, sequence=32, candidates="imatrix,rtn"
    )
    assert contents(tmp_path / "a") == contents(tmp_path / "alone")
    (note,) = [note for note in alone.notes if note.startswith("int4:best took")]
    for name in ("a", "b", "c"):
        told = json.loads((tmp_path / name / "report.json").read_text())
        assert note in told["notes"] and told["scheme"] == alone.scheme
        assert note in load_manifest(tmp_path / name).plan.notes
    shutil.rmtree(tmp_path / "b")
    one = bridge.batch(manifest, workers=1)  # what was measured lies in the outputs that are there
    assert one.passed and not one.calibrations and [row.kept for row in one.outcomes.values()] == [True, False, True]
    (tmp_path / "batch.batch.json").unlink()  # the outputs tell enough
    again = bridge.batch(manifest, workers=1)
    assert all(outcome.kept for outcome in again.outcomes.values()) and not again.calibrations
    written(tmp_path, row("a", more='candidates = "imatrix"'))
    assert bridge.batch(manifest, workers=1).outcomes["a"].kind == "WriteError"  # it asks for something else


def test_rows_that_measure_nothing_take_the_rule_at_once(tmp_path: Path) -> None:
    text = row("none", more='calib = "none"') + row("free", more='candidates = "rtn"') + row("data", "int4")
    none, free, data = plan_rows(read_manifest(written(tmp_path, text)).rows, make_engine(Settings(), Limits()))
    assert not (none.key or free.key) and data.key and data.measured
    assert none.digest == bridge_digest(calib="none", tmp_path=tmp_path)
    report = bridge.batch(tmp_path / "batch.toml", only=["none", "free"], workers=1)
    assert report.passed and not report.calibrations
    again = bridge.batch(tmp_path / "batch.toml", only=["none", "free"], workers=1)
    assert again.outcomes["none"].kept, again.outcomes["none"].error
    assert bridge.batch(tmp_path / "batch.toml", dry_run=True).outcomes["data"].status == PLANNED


def bridge_digest(tmp_path: Path, **words: Any) -> str:
    report = bridge.convert(TINY, "hf", "int4:best", tmp_path / "alone", verify=False, **words)
    return report.plan_digest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (row("a", more='candidates = "gptq,awqq"'), "int4 has no rule 'awqq'"),
        (row("a", "int4:gptq", 'candidates = "gptq"'), "narrows the choice .* quant is 'int4:gptq'"),
        (row("a", "int8_wo", 'calib = "none"'), "calib='none' .* quant is 'int8_wo'"),
        (row("a", more='kv = "fp9"'), "fp9"),
    ],
)
def test_what_is_wrong_with_a_choice_fails_its_row_before_work(text: str, said: str, tmp_path: Path) -> None:
    import re

    manifest = written(tmp_path, text, "")
    try:
        outcome = bridge.batch(manifest, dry_run=True).outcomes["a"]
        error = outcome.error
        assert outcome.status == FAILED
    except bridge.BridgeError as cause:
        error = str(cause)
    assert re.search(said, error), error


def test_a_killed_choice_goes_on_with_the_rules_that_it_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from bridge.api import conversion
    from bridge.api.best import measure

    manifest = written(tmp_path, row("a", more='candidates = "gptq,imatrix"'))
    planned = plan_rows(read_manifest(manifest).rows, make_engine(Settings(), Limits()))
    job, _ = make_jobs(planned, tmp_path, None)
    calibrated: list[str] = []
    real = conversion.calibrate

    def calibrate(one: Any) -> Calibration:
        calibrated.append(one.scheme.name)
        return real(one)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "calibrate", calibrate)
    with monkeypatch.context() as patched:
        patched.setattr(measure, "_errors", killed)
        with pytest.raises(KeyboardInterrupt):
            run_job(job, lambda event: None)
    kept = folder_of_rules(Path(job.calibrates))
    before = [*calibrated]
    assert before and len([*kept.glob("*.safetensors")]) == len(before)
    assert not run_job(job, lambda event: None).error
    assert calibrated == before and not kept.exists()
    provenance = Calibration.load(job.calibrates).provenance
    assert provenance.rule.startswith(f"int4:best took {provenance.scheme} on ")
