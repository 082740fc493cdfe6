"""Which programs load an output, as the contracts of `mappings/runtimes` say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bridge.core.text import grouped
from bridge.planning.contract_files import runtimes
from bridge.planning.contracts import Verdict, verdicts
from bridge.planning.plan import Plan
from bridge.targets import load_target

INSTEAD = "; write "
LOADING = ("program", "loads it", "known by, or why not")
KNOWN = {"run": "yes", "built": "yes, by its compiler", "read": "yes, by its source", "no": "no"}


@dataclass(frozen=True)
class Loading:
    """Whether one program, in one version, loads an output.

    `how`: "run", "built" and "read" say how it is known that it does, "no" that it does not. `where`: the tests or the
    files of its source; or the reason, and the flags to write with instead. The others are those of `Verdict`.
    """

    program: str
    how: str
    where: str
    ranks: int = 0
    mistake: str = ""
    inputs: str = ""

    @property
    def limit(self) -> str:
        """What stands behind the answer, in brackets: how many ranks may share the output, what inputs become."""
        ranks = f"tensor parallel up to {self.ranks}" if self.ranks > 1 else "on one rank: no tensor parallelism"
        parts = ["built, not run"] if self.how == "built" else []
        parts += [ranks] if self.ranks else []
        parts += [f"rounds inputs to {self.inputs}"] if self.inputs else []
        return f" ({'; '.join(parts)})" if parts else ""


def loadings(plan: Plan) -> tuple[Loading, ...]:
    """One entry per program that loads outputs of the plan's target."""
    why_not = load_target(plan.target).why_not_loaded(plan)
    return tuple(
        Loading(answer.runtime.title, "no", why_not, mistake=why_not)
        if why_not
        else Loading(
            answer.runtime.title,
            answer.how,
            _why_not(answer) or ", ".join(dict.fromkeys(evidence.where for evidence in answer.evidence)),
            answer.ranks,
            answer.mistake,
            answer.inputs,
        )
        for answer in verdicts(runtimes(), plan)
    )


def _why_not(answer: Verdict) -> str:
    return f"{answer.why_not}{INSTEAD}{answer.instead}" if answer.instead else answer.why_not


def loading_rows(entries: Iterable[Loading]) -> list[tuple[str, str, str]]:
    """Rows of a table with the columns `LOADING`."""
    return [(entry.program, f"{KNOWN[entry.how]}{entry.limit}", entry.where) for entry in entries]


def loading_line(entries: Iterable[Loading]) -> str:
    """The programs that load an output; "" if no contract is about its target."""
    entries = list(entries)
    names = [f"{entry.program}{entry.limit}" for entry in entries if entry.how != "no"]
    refused = sorted((entry for entry in entries if not entry.mistake), key=lambda entry: INSTEAD not in entry.where)
    why = next((f" ({entry.program}: {entry.where})" for entry in refused), "")  # what to write comes first
    loaded = ", ".join(names) or f"no program that a contract is about{why}"
    mistaken = grouped((entry for entry in entries if entry.mistake), lambda entry: entry.mistake)
    not_in = (f"not {', '.join(entry.program for entry in group)}: {group[0].mistake}" for group in mistaken)
    return "; ".join([loaded, *not_in]) if entries else ""
