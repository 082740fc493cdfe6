"""The report of a conversion says how to inspect it, and links the page once that was done."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("torch")

import bridge
from bridge.core.errors import BridgeWarning
from bridge.reporting.make import link_inspection
from bridge.reporting.page import page_of
from bridge.sources.opening import open_source

LLAMA = "examples/models/tiny-llama"


def texts(report: bridge.Report) -> list[str]:
    return [section.text for section in page_of(report).sections if section.id == "inspection"]


@pytest.mark.slow
def test_the_report_links_the_inspection_of_its_output(tmp_path: Path) -> None:
    out, seen = tmp_path / "out", tmp_path / "a b.inspect"
    report = bridge.convert(LLAMA, "hf", "int8_wo", out, verify=False, progress=False)
    assert texts(report) == [f"qbridge inspect {LLAMA} --against {out} --out {out}.inspect"]
    before = json.loads((out / "report.json").read_text())
    assert "href=" in (out / "report.html").read_text() and "inspect.html" not in (out / "report.html").read_text()
    bridge.inspect(LLAMA, against=out, samples=2, sequence=16, out=seen, progress=False)
    after = json.loads((out / "report.json").read_text())
    assert after == {**before, "inspected": "../a%20b.inspect/inspect.html"}
    assert (out / unquote(after["inspected"])).resolve() == seen / "inspect.html"
    assert 'href="../a%20b.inspect/inspect.html"' in (out / "report.html").read_text()
    assert {path.name for path in out.iterdir() if path.name.startswith("report")} == {"report.html", "report.json"}


@pytest.mark.slow
def test_an_inspection_of_nothing_written_leaves_the_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bridge.convert(LLAMA, "hf", "int8_wo", out, verify=False, progress=False)
    before = (out / "report.html").read_bytes()
    bridge.inspect(LLAMA, against=out, samples=2, sequence=16, progress=False)
    assert (out / "report.html").read_bytes() == before


def test_a_live_model_is_inspected_in_python(tmp_path: Path) -> None:
    model = open_source(LLAMA).load_model()
    out = tmp_path / "it's"
    (text,) = texts(bridge.convert(model, "hf", "int8_wo", out, verify=False, progress=False))
    assert text == f'bridge.inspect(model, against="{out}", out="{out}.inspect")'


@pytest.mark.slow
def test_other_targets_are_inspected_under_their_scheme(tmp_path: Path) -> None:
    out = tmp_path / "it's"
    (text,) = texts(bridge.convert(LLAMA, "trtllm", "int8_wo", out, verify=False, progress=False))
    assert text == f"qbridge inspect {LLAMA} --quant int8_wo --out {shlex.quote(str(out))}.inspect"
    assert texts(bridge.convert(LLAMA, "megatron", None, tmp_path / "plain", verify=False, progress=False)) == []


def test_a_report_that_cannot_be_read_is_left_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"parity": {}, "of": "another version"}')
    with pytest.warns(BridgeWarning, match="its report does not link"):
        link_inspection(tmp_path, tmp_path / "seen")
    assert (tmp_path / "report.json").read_text().startswith('{"parity"')
    link_inspection(tmp_path / "without one", tmp_path / "seen")
