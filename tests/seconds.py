"""Processor seconds of a test run by file, divided by those of a fixed piece of work timed in the same run.

    pytest --seconds            # print the twenty slowest files and the measure; fail above the budget;
                                # build/seconds.json has those of every test function

Seconds alone differ by a factor of three between machines, and from hour to hour on one. The piece of work allocates
as the suite does, so both slow down together, and a slow machine does not fail a run. The budget is in
`tests/budget.toml`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import tomllib
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

BUDGET = Path(__file__).with_name("budget.toml")
FUNCTIONS = Path(__file__).parent.parent / "build" / "seconds.json"
ROWS = 50_000  # of the piece of work, a quarter of a second
BETWEEN = 120.0  # wall seconds between two timings
SLOWEST = 20
COLLECTING = "(collecting)"
LEFT = "(processes that outlive their tests)"


def work() -> float:
    """Processor seconds of the piece of work: small dictionaries through JSON and back, indexed and sorted."""
    begin = time.process_time()
    rows = [{"name": f"layer.{i}", "shape": [i % 97, i % 13], "value": i * 0.5} for i in range(ROWS)]
    index = {row["name"]: row for row in json.loads(json.dumps(rows))}
    assert len(sorted(index.values(), key=lambda row: (row["shape"], row["name"]))) == ROWS
    return time.process_time() - begin


def spent() -> float:
    """Processor seconds of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def running() -> float:
    """Processor seconds of the children that have not ended."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and of its own children
        except psutil.Error:
            continue
    return total


class Clock:
    """Measures the process that runs tests: a worker, or the only one."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.works = [work()]
        self.at = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            self.functions[COLLECTING] += spent()  # from the start of the process on

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        begin = spent()
        try:
            return (yield)
        finally:
            self.functions[item.nodeid.partition("[")[0]] += spent() - begin
            if time.monotonic() - self.at > BETWEEN:
                self.works.append(work())
                self.at = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.functions[LEFT] += running()
        self.works.append(work())
        if output := getattr(session.config, "workeroutput", None):
            output["seconds"] = {"functions": dict(self.functions), "works": self.works}


class Report:
    """Adds up what the workers measured, prints it, and fails the run above the budget."""

    def __init__(self, clock: Clock | None) -> None:
        self.clock = clock
        self.functions: Counter[str] = Counter()
        self.works: list[float] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        measured = getattr(node, "workeroutput", {}).get("seconds", {"functions": {}, "works": []})
        self.functions.update(measured["functions"])
        self.works += measured["works"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.clock:
            self.functions.update(self.clock.functions)
            self.works += self.clock.works
        if self.works:
            FUNCTIONS.parent.mkdir(exist_ok=True)
            FUNCTIONS.write_text(json.dumps(dict(self.functions.most_common()), indent=0))
        if self.works and session.exitstatus == 0 and self.measure() > budget():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def measure(self) -> float:
        """Processor seconds of the run in units of the piece of work."""
        return sum(self.functions.values()) / statistics.median(self.works)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.works:
            return
        terminalreporter.section("processor seconds")
        files: Counter[str] = Counter()
        for function, seconds in self.functions.items():
            files[function.partition("::")[0]] += seconds
        for file, seconds in files.most_common(SLOWEST):
            terminalreporter.line(f"{seconds:8.1f}  {file}")
        works = f"median of {len(self.works)}, {min(self.works):.2f} to {max(self.works):.2f} s"
        terminalreporter.line(
            f"{sum(self.functions.values()):8.0f}  in all = {self.measure():.0f} times the piece of work ({works}); "
            f"budget {budget()}"
        )
        if self.measure() > budget():
            terminalreporter.line(
                f"The suite costs more than its budget: make it cheaper, mark rows `product`, or raise the number in "
                f"{BUDGET.name} with a reason.",
                red=True,
            )


def budget() -> int:
    """The measure that a run may have."""
    return int(tomllib.loads(BUDGET.read_text())["suite"]["seconds"])


def register(config: pytest.Config) -> None:
    """Measure this run if `--seconds` asks for it."""
    if not config.getoption("seconds"):
        return
    worker, workers = hasattr(config, "workerinput"), config.getoption("numprocesses", None)
    clock = Clock() if worker or not workers else None
    if clock:
        config.pluginmanager.register(clock, "seconds-clock")
    if not worker:
        config.pluginmanager.register(Report(clock), "seconds-report")
