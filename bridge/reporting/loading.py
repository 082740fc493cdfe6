"""Which programs load an output, as the contracts of `mappings/runtimes` say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bridge.planning.contract_files import runtimes
from bridge.planning.contracts import Verdict, verdicts
from bridge.planning.plan import Plan
from bridge.targets import load_target

INSTEAD = "; write "
LOADING = ("program", "loads it", "known by, or why not")
SHOWN = 3  # programs of a line; a table has all
# Programs that most users ask about come first, the others by name.
FIRST = ("vllm", "sglang", "transformers", "trtllm", "llama.cpp", "mlx", "onnxruntime", "tensorrt-rtx")
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
    """One entry per program that loads outputs of the plan's target, the one that was asked for first."""
    order = (plan.program, *FIRST)
    answers = sorted(
        verdicts(runtimes(), plan),
        key=lambda answer: order.index(answer.runtime.name) if answer.runtime.name in order else len(order),
    )
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
        for answer in answers
    )


def _why_not(answer: Verdict) -> str:
    return f"{answer.why_not}{INSTEAD}{answer.instead}" if answer.instead else answer.why_not


def loading_rows(entries: Iterable[Loading]) -> list[tuple[str, str, str]]:
    """Rows of a table with the columns `LOADING`."""
    return [(entry.program, f"{KNOWN[entry.how]}{entry.limit}", entry.where) for entry in entries]


def loading_line(entries: Iterable[Loading]) -> str:
    """At most three programs that load an output, and what to write for others; "" if no contract is about its target.

    The table of a report, and `plan --all`, say of each why not.
    """
    entries = list(entries)
    names = [f"{entry.program}{entry.limit}" for entry in entries if entry.how != "no"][:SHOWN]
    refused = [entry for entry in entries if entry.how == "no"]
    helped = [entry for entry in refused if INSTEAD in entry.where and (entry.mistake or not names)][:1]
    others = [f"for {name}: --for {flag_word(name)}" for entry in helped for name in [entry.program.rpartition(" ")[0]]]
    if names or not refused:
        return "; ".join([*([", ".join(names)] if names else []), *others])
    why = f" ({refused[0].program}: {refused[0].where})"
    return (
        "; ".join(["no program as it is written", *others]) if others else f"no program that a contract is about{why}"
    )


def flag_word(program: str) -> str:
    """A program as --for takes it, quoted where its name has a blank."""
    word = program.lower()
    return f'"{word}"' if " " in word else word
