"""The axis of transformers, run in `make test-all`; and what is declared, against what the last runs recorded."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from docs.generate import make
from tests.matrix.__main__ import CELLS, RESULTS, cells, compared, run
from tests.matrix.conversions import EXACT, RUN
from tests.matrix.layers import ROOT, NotRun, environment

RECORDED: dict[str, Any] = tomllib.loads(RESULTS.read_text())
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def pinned() -> Iterator[list[dict[str, Any]]]:
    return run([])


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("cell", CELLS["transformers"])
def test_conversions_end_as_recorded(cell: str, pinned: list[dict[str, Any]]) -> None:
    try:
        result = compared(pinned, run(CELLS["transformers"][cell]))
    except NotRun as why:
        pytest.skip(str(why))
    recorded = RECORDED[f"transformers {cell}"]
    assert not result["failed"] and {*recorded.get("refused", ())} <= {*result["refused"]}
    assert recorded["not_run"] or {*result["refused"]} == {*recorded.get("refused", ())}


def test_the_ends_of_a_declared_range_and_each_cell_in_it_ran_without_a_failure() -> None:
    for extra in ("trt", "calibrate"):
        for need in map(Requirement, EXTRAS[extra]):
            if need.name in ("torch", "transformers"):
                ran = {
                    cell[need.name].partition("+")[0]: cell.get("failed")
                    for cell in RECORDED.values()
                    if need.name in cell
                }
                assert not [version for version, failed in ran.items() if version in need.specifier and failed]
                bounds = {part.operator: Version(part.version).release for part in need.specifier}
                (major, minor), lowest = bounds["<"], ".".join(map(str, bounds[">="]))
                for end in (lowest, f"{major}.{minor - 1}"):
                    assert any(version.startswith(f"{end}.") for version in ran), (need, ran)


def test_every_recorded_cell_is_known() -> None:
    assert {*RECORDED} <= {f"{axis} {cell}" for axis, cell, _ in cells([])}


def test_an_axis_or_a_cell_is_named_by_its_words() -> None:
    assert [cell for _, cell, _ in cells(["transformers"])] == [*CELLS["transformers"]]
    assert cells(["torch", "2.14"]) == [("torch", "2.14", ["torch==2.14.1"])]


def test_rows_count_as_same_passed_refused_or_failed() -> None:
    def row(name: str, **fields: Any) -> dict[str, Any]:
        return {"row": name, "exact": False, "passed": True, "digest": "a", **fields}

    names = ("equal", "graph", "missing", "crashed", "bytes", "wrong", "late")
    there = [
        {"python": "3.11", "versions": {"torch": "2.14"}},
        row("equal", exact=True), row("graph", digest="b"),
        {"row": "missing", "error": "PlanError: x", "refused": True},
        {"row": "crashed", "error": "KeyError: y", "refused": False}, row("bytes", exact=True, digest="b"),
        row("wrong", passed=False, digest="b"),
    ]  # fmt: skip
    result = compared([{}, *map(row, names)], there)
    assert (result["same"], result["passed"], result["not_run"], result["torch"]) == (1, 1, 1, "2.14")
    assert result["refused"] == {"missing": "PlanError: x"}
    assert result["failed"] == {
        "crashed": "KeyError: y", "bytes": "other bytes", "wrong": "its verification failed",
    }  # fmt: skip


def test_the_set_meets_every_target_that_writes_here() -> None:
    from bridge.targets import target_names

    assert {row[1] for row in (*EXACT, *RUN)} == {*target_names()}


def test_layers_come_first_with_the_shared_objects_in_them(tmp_path: Path) -> None:
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    variables = environment([tmp_path])
    assert variables["PYTHONPATH"].split(":") == [str(tmp_path), str(ROOT)]
    assert variables["LD_LIBRARY_PATH"] == str(tmp_path / "nvidia" / "cu13" / "lib")


def test_the_page_names_each_cell_and_what_it_refused() -> None:
    assert all(name in make("versions") for name in RECORDED)
    refused = [row for cell in RECORDED.values() for row in (*cell.get("refused", ()), *cell.get("failed", ()))]
    assert all(f"`{row}`" in make("refused-versions") for row in refused)
