"""Rows that share a graph make it once, also at the same time in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.core.output import cache
from bridge.workflows.batch.manifest.read import read_manifest
from bridge.workflows.batch.run import BatchOptions, run
from bridge.workflows.batch.values import DONE
from tests.workflows.batch.test_run import TINY, Spectator

GPT2 = TINY.with_name("tiny-gpt2")  # graphs of Llamas are filled in


@pytest.mark.slow
def test_rows_of_one_model_export_its_graph_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    schemes = ("int8_wo", "int4_wo")
    rows = "".join(f'[[row]]\nname = "{scheme}"\nout = "{scheme}"\nquant = "{scheme}"\n' for scheme in schemes)
    manifest = tmp_path / "batch.toml"
    manifest.write_text(f'[defaults]\nmodel = "{GPT2}"\ntarget = "trt"\nverify = false\n{rows}')
    spectator = Spectator()
    report = run(read_manifest(manifest), BatchOptions(workers=2), spectator)
    assert {name: outcome.status for name, outcome in report.outcomes.items()} == dict.fromkeys(schemes, DONE)
    exported = [event for event in spectator.events if event.stage.startswith("export")]
    assert [event.stage for event in exported] == ["export 2 of 4 layers"]
    assert len({event.name for event in spectator.events}) == 2
    assert [entry.kind for entry in cache.entries()] == ["graphs"]
