"""What a notebook shows, run as a reader runs it: tables of results, bars while it works, silence if asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")

import nbformat  # noqa: E402

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
CELLS = (
    f"import bridge\nMODEL = {str(MODEL)!r}",
    "bridge.plan(MODEL, target='hf', quant='int8_wo')",
    "bridge.convert(MODEL, target='hf', quant='int8_wo', out='out')",
    "bridge.convert(MODEL, target='hf', quant='int8_wo', out='silent', progress=False).passed",
)


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
def test_work_shows_bars_unless_it_is_asked_to_be_silent(outputs: list[list[Any]]) -> None:
    def streamed(shown: list[Any]) -> list[Any]:
        return [output for output in shown if output.output_type != "execute_result"]

    (bars,) = streamed(outputs[2])
    assert bars.output_type == "display_data" and "weights 100%" in bars.data["text/html"]
    assert streamed(outputs[3]) == []
