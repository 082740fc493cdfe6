"""What a notebook shows, run as a reader runs it: tables of results, bars while it works, silence if asked."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")

import nbformat  # noqa: E402

from bridge.core import progress_bar  # noqa: E402

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
BATCH = """
from pathlib import Path
rows = ', '.join(f'{{name = "row{n}", model = {MODEL!r}, target = "hf", quant = "int8_wo"}}' for n in range(3))
_ = Path('batch.toml').write_text(f'row = [{rows}]')
bridge.batch('batch.toml', workers=1)
"""
CELLS = (
    f"import bridge\nMODEL = {str(MODEL)!r}",
    "bridge.plan(MODEL, target='hf', quant='int8_wo')",
    "bridge.convert(MODEL, target='hf', quant='int8_wo', out='out')",
    "bridge.convert(MODEL, target='hf', quant='int8_wo', out='silent', progress=False).passed",
    BATCH,
)


FIRST_HOUR = Path(__file__).parents[2] / "examples" / "first_hour.ipynb"


def test_the_notebook_of_the_first_hour_is_stored_without_outputs_and_links_to_pages_that_exist() -> None:
    book = nbformat.read(FIRST_HOUR, as_version=4)
    nbformat.validate(book)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")
    links = re.findall(r"\]\((\.\./[^)#]+)", FIRST_HOUR.read_text())
    assert links and all((FIRST_HOUR.parent / link).is_file() for link in links)


@pytest.mark.slow
def test_the_notebook_of_the_first_hour_runs_and_shows_what_each_scheme_costs(tmp_path: Path) -> None:
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "models").symlink_to(MODEL.parent)
    book = nbformat.read(FIRST_HOUR, as_version=4)
    client = nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute()
    said = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    costs = [float(cost) for cost in re.findall(r": x ([\d.]+)$", said, re.MULTILINE)]
    assert len(costs) == 2 and 1 <= costs[0] < costs[1] < 1.2
    assert (tmp_path / "out" / "first-hour" / "fp8" / "bridge.json").is_file()
    assert any("vllm serve ../out/first-hour/fp8" in str(cell.get("outputs")) for cell in book.cells)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    folder = tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in book.cells]


def page(shown: list[Any]) -> str:
    return next(output.data["text/html"] for output in shown if output.output_type == "execute_result")


@pytest.mark.slow
def test_results_are_tables(outputs: list[list[Any]]) -> None:
    assert "<table>" in page(outputs[1]) and "mlp.up_proj" in page(outputs[1])
    assert "parity   passed" in page(outputs[2]) and "w int8" in page(outputs[2])
    assert all(len(str(shown)) < 60_000 for shown in outputs)


@pytest.mark.slow
def test_a_batch_has_one_bar(outputs: list[list[Any]]) -> None:
    (bars,) = [output for output in outputs[4] if output.output_type == "display_data"]
    assert bars.data["text/html"].count("<progress") == 1 and "rows 100%" in bars.data["text/html"]
    assert "3 rows: 3 done" in page(outputs[4])


def test_work_of_unknown_length_is_done_when_other_work_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)
    display = SimpleNamespace(HTML=str, display=lambda *_, **__: handle)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    bars = progress_bar.NotebookBars()
    bars(0, 0, "calibrate")
    bars(1, 2, "weights")
    bars(2, 2, "weights")
    assert shown[0] == "<progress ></progress> calibrate "
    assert shown[-1].splitlines() == [
        '<progress value="1" max="1"></progress> calibrate 100%<br><progress value="2" max="2"></progress> weights 100%'
    ]


@pytest.mark.slow
def test_work_shows_bars_unless_it_is_asked_to_be_silent(outputs: list[list[Any]]) -> None:
    def streamed(shown: list[Any]) -> list[Any]:
        return [output for output in shown if output.output_type != "execute_result"]

    (bars,) = streamed(outputs[2])
    assert bars.output_type == "display_data" and "weights 100%" in bars.data["text/html"]
    assert streamed(outputs[3]) == []
