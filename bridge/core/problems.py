"""What is wrong with a manifest or a recipe, collected, so that all of it is told at once; must never raise it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import BridgeError, first_of

SHOWN = 3  # places that a problem names
MOST = 100  # kinds of problems that are looked for
MOST_PLACES = 3000  # and problems
ENOUGH = "these problems are enough; what follows was not looked at"


@dataclass
class Problems:
    """`found`: what is wrong -> where, "" for a place that the text names itself. `places`: of all of them."""

    found: dict[str, list[str]] = field(default_factory=dict)
    places: int = 0

    def __len__(self) -> int:
        return len(self.found)

    @property
    def enough(self) -> bool:
        """Whether nobody reads more."""
        return len(self) >= MOST or self.places >= MOST_PLACES

    def add(self, text: str, where: str = "") -> None:
        """Note what is wrong."""
        self.places += 1
        self.found.setdefault(text, []).append(where)

    def take(self, make: Callable[..., Any], *arguments: Any, where: str = "") -> Any:
        """What `make` returns; None where it raises, which is noted."""
        try:
            return make(*arguments)
        except BridgeError as error:
            self.add(str(error), where)
            return None

    def lines(self) -> list[str]:
        """One line for each text, after the places that it holds for."""
        return [_line(text, [*dict.fromkeys(filter(None, where))]) for text, where in self.found.items()]


def _line(text: str, where: list[str]) -> str:
    return f"{first_of(where, SHOWN)}: {text}" if where else text
