"""`pytest --seconds` adds up what workers measured, and fails above the budget."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import seconds


@pytest.fixture(autouse=True)
def _functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(seconds, "FUNCTIONS", tmp_path / "seconds.json")


def _report(functions: dict[str, float], works: list[float]) -> seconds.Report:
    report = seconds.Report(None)
    for _ in range(2):
        report.pytest_testnodedown(SimpleNamespace(workeroutput={"seconds": {"functions": functions, "works": works}}))
    return report


@pytest.mark.parametrize(("budget", "status"), [(399, pytest.ExitCode.TESTS_FAILED), (400, 0)])
def test_a_run_above_its_budget_fails(monkeypatch: pytest.MonkeyPatch, budget: int, status: int) -> None:
    monkeypatch.setattr(seconds, "budget", lambda: budget)
    session: Any = SimpleNamespace(exitstatus=0)
    _report({"a": 60.0, "b": 40.0}, [0.4, 0.5, 9.0]).pytest_sessionfinish(session)
    assert session.exitstatus == status
    assert json.loads(seconds.FUNCTIONS.read_text()) == {"a": 120.0, "b": 80.0}


def test_a_slow_machine_changes_nothing() -> None:
    fast, slow = _report({"a": 60.0}, [0.5]), _report({"a": 180.0}, [1.5])
    assert fast.measure() == slow.measure() == 240


def test_a_failed_run_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seconds, "budget", lambda: 10_000)
    session: Any = SimpleNamespace(exitstatus=2)
    _report({"a": 1.0}, [0.5]).pytest_sessionfinish(session)
    assert session.exitstatus == 2


def test_the_piece_of_work_is_timed() -> None:
    assert 0.01 < seconds.work() < 60
