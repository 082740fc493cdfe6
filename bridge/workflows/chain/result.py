"""What a chain gave, step by step."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from bridge.core.display import Displayed, Table
from bridge.core.text import number, size
from bridge.reporting.report import Report

COLUMNS = ("step", "verb", "size", "seconds", "perplexity", "passed")


@dataclass(frozen=True)
class StepDone:
    """One step. `report`: of its output; `seconds`: of the run that finished it. `kept`: an earlier run did.

    `trained`: the next step distills it, so that its perplexity does not end the chain.
    """

    name: str
    verb: str
    report: Report
    seconds: float
    kept: bool = False
    trained: bool = False

    @property
    def passed(self) -> bool:
        return self.report.faithful if self.trained and self.report.ruined else self.report.passed

    @property
    def perplexity(self) -> tuple[float, float] | None:
        """Before and after the step, on text held out of its data; None if it measured none."""
        report = self.report
        if self.verb == "distill" and report.distillation and report.distillation.held_out:
            return report.distillation.held_out[0][2], report.distillation.held_out[-1][2]
        if self.verb == "prune" and report.pruning and report.pruning.perplexity:
            return report.pruning.perplexity[0], report.pruning.perplexity[1]
        return None


@dataclass(frozen=True, repr=False)
class ChainReport(Displayed):
    """The steps that ran or were kept, in order; `passed` if all of them did."""

    steps: tuple[StepDone, ...]

    @property
    def passed(self) -> bool:
        return all(step.passed for step in self.steps)

    def to_json(self) -> str:
        """The steps as JSON with `indent=2`."""
        rows = [
            {"name": s.name, "verb": s.verb, "kept": s.kept, "seconds": s.seconds, "perplexity": s.perplexity}
            | {"report": dataclasses.asdict(s.report)}
            for s in self.steps
        ]
        return json.dumps({"steps": rows, "passed": self.passed}, indent=2, allow_nan=False, default=str)

    def lines(self) -> list[str]:
        kept = sum(step.kept for step in self.steps)
        text = f"{number(len(self.steps), 'step')}, {'all passed' if self.passed else 'FAILED'}"
        return [text + (f"; {kept} made by an earlier run" if kept else ""), *map(_line, self.steps)]

    def table(self) -> Table:
        return COLUMNS, [_row(step) for step in self.steps]


def _row(step: StepDone) -> tuple[str, ...]:
    change = step.perplexity
    told = f"{change[0]:.2f} -> {change[1]:.2f}" if change else ""
    verdict = "passed" if step.passed else "FAILED"
    seconds = "kept" if step.kept else f"{step.seconds:.1f}"
    return step.name, step.verb, size(step.report.bytes), seconds, told, verdict


def _line(step: StepDone) -> str:
    name, verb, nbytes, seconds, told, verdict = _row(step)
    took = "kept from an earlier run" if step.kept else f"{seconds} s"
    perplexity = f", perplexity {told}" if told else ""
    return f"{name}: {verb}, {nbytes}, {took}{perplexity}, {verdict}: {step.report.out}"
