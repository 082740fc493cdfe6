"""Collect the problems of a manifest or a recipe for one message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bridge.core.errors import BridgeError
from bridge.core.text import first_of

SHOWN = 3  # places that a problem names
MAX_KINDS = 100  # kinds of problems that are looked for
MAX_PLACES = 3000  # problems that are looked for
ENOUGH = "these problems are enough; what follows was not looked at"


@dataclass
class Problems:
    """`found`: problem -> its places, "" if the text names the place. `places`: the count of all places."""

    found: dict[str, list[str]] = field(default_factory=dict)
    places: int = 0

    def __len__(self) -> int:
        return len(self.found)

    @property
    def enough(self) -> bool:
        """Whether a reader has seen enough problems."""
        return len(self) >= MAX_KINDS or self.places >= MAX_PLACES

    def add(self, text: str, where: str = "") -> None:
        """Add a problem."""
        self.places += 1
        self.found.setdefault(text, []).append(where)

    def take(self, make: Callable[..., Any], *arguments: Any, where: str = "") -> Any:
        """Return the result of `make`; None if it raises, which is added."""
        try:
            return make(*arguments)
        except BridgeError as error:
            self.add(str(error), where)
            return None

    def lines(self) -> list[str]:
        """Return one line for each problem, after its places."""
        named = {text: [*dict.fromkeys(filter(None, where))] for text, where in self.found.items()}
        return [f"{first_of(where, SHOWN)}: {text}" if where else text for text, where in named.items()]
