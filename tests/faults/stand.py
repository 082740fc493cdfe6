"""Where commands are struck: one server, what they read, and how each ends when nobody disturbs it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.faults.commands import Command, make_given
from tests.faults.store import Store
from tests.faults.struck import Ended, Server, contents, left_over, timeless


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
        self._calm: dict[tuple[str, str, int | None], Calm] = {}

    @cached_property
    def store(self) -> Store:
        """Where the outputs of far commands go."""
        return Store()

    def place(self, command: Command) -> tuple[Path, list[str]]:
        """A new folder for a command, prepared, and the arguments."""
        place = self._folder / f"{next(self._numbers)}"
        if not command.far:
            return place, command.prepared(place, self.given)
        if command.before:
            self.store.put(self.given / command.before, place.name)
        return place, command.prepared(place, self.given, self.store.address(place.name))

    def found(self, command: Command, place: Path) -> dict[str, bytes]:
        """What a command has left at its output, wherever that is; a report of it without its times."""
        return timeless(self.store.files(place.name)) if command.far else contents(place / "out")

    def run(self, command: Command, place: Path, argv: list[str], **fault: Any) -> Ended:
        """Run it in its folder; `fault` is what `server` and `shim.c` understand."""
        if command.name not in self._warm and not command.manifest:  # workers of a batch are processes of their own
            self._warm.add(command.name)
            warm = self._folder / f"{next(self._numbers)}"
            self._server.warm(command.prepared(warm, self.given), warm)
        env = {"env": self.store.environment} if command.far else {}
        return self._server.run(argv, place, **env, **fault)

    def calm(self, command: Command, counted: str = "change", worker: int | None = None) -> Calm:
        """Run it undisturbed, once for all tests. Of reads those of `given` are counted; with `worker`, calls of it."""
        key = (command.name, counted, worker)
        if key not in self._calm:
            place, argv = self.place(command)
            of: dict[str, Any] = {"folder": str(self.given)} if counted == "read" else {}
            of |= {} if worker is None else {"worker": worker}
            ended = self.run(command, place, argv, classes=[counted], **of)
            assert ended.code == 0, ended.said
            assert left_over(place) == []
            self._calm[key] = Calm(ended.calls or 0, ended.seconds, place, self.found(command, place))
        return self._calm[key]

    def close(self) -> None:
        """End the server, and the store if there is one."""
        self._server.close()
        if "store" in vars(self):
            self.store.close()
