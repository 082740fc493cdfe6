"""Portions of a plan: what one process of several writes, and who runs them; must never touch a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import threading

    from bridge.conversion import Conversion

# Portions for each process, at most: the last to end wait for little, and what a killed one had begun is little.
EACH = 8
LEAST = 64 << 20  # bytes of a portion where there are several for each process: to start one takes 0.1 s and more


@dataclass(frozen=True)
class Portion:
    """Some of a plan's steps, by their keys. `done`: those of them that are written, and what they told."""

    steps: tuple[str, ...]
    done: Mapping[str, Mapping[str, Any]]


class Spread(Protocol):
    """Runs portions of a plan in other processes, which see the same files under the same paths."""

    @property
    def processes(self) -> int:
        """How many portions run at once."""

    def run(
        self, conversion: Conversion, portions: Sequence[Portion], stop: threading.Event
    ) -> Iterator[Mapping[str, Mapping[str, Any]]]:
        """Let `bridge.stream.run_portion` run each, again where its process dies; yield what it returns when it ends.

        The first error ends the run; so does `stop`, and closing the iterator: nothing writes any more after that.
        """


def cut(
    tasks: Sequence[tuple[tuple[str, ...], int]], done: Mapping[str, Mapping[str, Any]], processes: int
) -> list[Portion]:
    """Put tasks, each the keys of its steps and its bytes, together; those that run at once are far from each other.

    Neighbours write to one file: two processes in one file wait for its lock.
    """
    total = sum(nbytes for _, nbytes in tasks)
    size = total / processes / min(max(total // processes // LEAST, 1), EACH)
    found: list[Portion] = []
    keys: list[str] = []
    taken = 0
    for number, (names, nbytes) in enumerate(tasks, 1):
        keys += names
        taken += nbytes
        if taken >= size * (len(found) + 1) or number == len(tasks):
            found.append(Portion(tuple(keys), {key: done[key] for key in keys if key in done}))
            keys = []
    stride = -(-len(found) // processes)
    return [portion for first in range(stride) for portion in found[first::stride]]
