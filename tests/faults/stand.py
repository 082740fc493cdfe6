"""Where commands are struck: one server, what they read, and how each ends when nobody disturbs it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.commands import Command, make_given
from tests.faults.struck import Ended, Server, contents, left_over


@dataclass(frozen=True)
class Calm:
    """A run that nothing disturbed: how many of the counted calls it made, how long it took, and what is then there."""

    calls: int
    seconds: float
    place: Path
    out: dict[str, bytes]


class Stand:
    """A server that is started when the first command is asked for; each command is warmed before its first run."""

    def __init__(self, shim: Path, folder: Path) -> None:
        self.given = folder / "given"
        make_given(self.given)
        self._server = Server(shim, folder / "cache")
        self._folder, self._numbers = folder, itertools.count()
        self._warm: set[str] = set()
        self._calm: dict[tuple[str, str], Calm] = {}

    def place(self, command: Command) -> tuple[Path, list[str]]:
        """A new folder for a command, prepared, and the arguments."""
        place = self._folder / f"{next(self._numbers)}"
        return place, command.prepared(place, self.given)

    def run(self, command: Command, place: Path, argv: list[str], **fault: Any) -> Ended:
        """Run it in its folder; `fault` is what `server` and `shim.c` understand."""
        if command.name not in self._warm and not command.manifest:  # workers of a batch are processes of their own
            self._warm.add(command.name)
            warm, same = self.place(command)
            self._server.warm(same, warm)
        return self._server.run(argv, place, **fault)

    def calm(self, command: Command, counted: str = "change") -> Calm:
        """Run it undisturbed, once for all tests; of reads those of `given` are counted."""
        key = (command.name, counted)
        if key not in self._calm:
            place, argv = self.place(command)
            of = {"folder": str(self.given)} if counted == "read" else {}
            ended = self.run(command, place, argv, classes=[counted], **of)
            assert ended.code == 0, ended.said
            assert left_over(place) == []
            self._calm[key] = Calm(ended.calls or 0, ended.seconds, place, contents(place / "out"))
        return self._calm[key]

    def close(self) -> None:
        """End the server."""
        self._server.close()
