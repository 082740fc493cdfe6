"""A fault of a checkpoint, and what each program makes of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.core.text import SHOWN, first_of, fold_layers
from bridge.planning.contract_files import load_runtime
from bridge.planning.faults import FAULTS, NOTE

SERVING = ("vllm", "sglang", "transformers", "trtllm")  # what loads checkpoints as others write them
NOT_SHOWN = "not shown"
COMMAND = "qbridge repair DIR --out NEW"


@dataclass(frozen=True)
class Finding:
    """A fault. `rule`: its row in `FAULTS`, which says how bad it is; `where`: tensors or modules, () for the whole.

    `mend`: what mends it. `repairs`: whether `bridge.repair` does.
    """

    rule: str
    what: str
    where: tuple[str, ...] = ()
    mend: str = COMMAND
    repairs: bool = False

    @property
    def severity(self) -> str:
        return FAULTS[self.rule]

    @property
    def fatal(self) -> bool:
        return self.severity != NOTE

    def at(self, directory: Path) -> Finding:
        """The finding with the directory in the command that mends it."""
        return replace(self, mend=self.mend.replace(COMMAND, COMMAND.replace("DIR", shlex.quote(str(directory)))))

    def programs(self) -> dict[str, str]:
        """What each program makes of it and how that is known, or `NOT_SHOWN`."""
        return {known.title: known.faults.get(self.rule, NOT_SHOWN) for known in map(load_runtime, SERVING)}

    def to_dict(self) -> dict[str, Any]:
        """The finding for JSON, with layers folded."""
        where = fold_layers(self.where)
        return {
            "rule": self.rule, "severity": self.severity, "where": where, "what": self.what,
            "programs": self.programs(), "mend": self.mend, "repairs": self.repairs,
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n    ".join(self._lines())

    @property
    def told(self) -> str:
        """One line: how bad it is, its rule, where, and what."""
        names = first_of(fold_layers(self.where), SHOWN)
        return f"{self.severity} [{self.rule}] {names}{': ' if names else ''}{self.what}"

    def _lines(self) -> Iterator[str]:
        yield self.told
        programs = self.programs()
        yield from (f"{program}: {does}" for program, does in programs.items() if does != NOT_SHOWN)
        silent = [program for program, does in programs.items() if does == NOT_SHOWN]
        if silent and len(silent) < len(programs):
            yield f"{', '.join(silent)}: {NOT_SHOWN}"
        yield f"mend: {self.mend}"
