"""Calls under way in processes of a Ray cluster; one whose process dies is made again, one that raises is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import exceptions

# What befalls a process, whatever it runs: killed, out of memory, its node gone. All else is an answer.
DIED = (
    exceptions.WorkerCrashedError,
    exceptions.LocalRayletDiedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.ObjectLostError,
)
EVERY = 0.2  # seconds between two looks at what runs
PATIENCE = 30.0  # seconds that a cancelled call gets to clean up


@dataclass(frozen=True)
class Ended:
    """A call that ended: what it returned, or what it raised; `died`: its process did, and so often was it made."""

    key: str
    answer: Any = None
    error: BaseException | None = None
    died: bool = False
    attempts: int = 1


@dataclass
class _Call:
    key: str
    function: Callable[..., Any]
    given: tuple[Any, ...]
    resources: Mapping[str, float]
    attempts: int = field(default=0)

    def make(self) -> Any:
        """Start it, the first time or again. Ray itself retries nothing: it would not tell."""
        self.attempts += 1
        return ray.remote(self.function).options(max_retries=0, **self.resources).remote(*self.given)


class Calls:
    """Calls by name. `retries`: how often one is made again after its process died; `again` is told its name then."""

    def __init__(self, retries: int, again: Callable[[str], None] = lambda key: None) -> None:
        self._retries, self._again = retries, again
        self._open: dict[Any, _Call] = {}

    def __len__(self) -> int:
        return len(self._open)

    def start(self, key: str, function: Callable[..., Any], *given: Any, **resources: float) -> None:
        """Call `function`, a module's own, with `given` where the cluster has `resources` free."""
        call = _Call(key, function, given, resources)
        self._open[call.make()] = call

    def ended(self) -> Iterator[Ended]:
        """Wait a moment; yield what ended."""
        if not self._open:
            return
        ready, _ = ray.wait(list(self._open), num_returns=1, timeout=EVERY)
        for ref in ready:
            call = self._open.pop(ref)
            try:
                yield Ended(call.key, ray.get(ref), attempts=call.attempts)
            except DIED as error:
                if call.attempts > self._retries:
                    yield Ended(call.key, error=error, died=True, attempts=call.attempts)
                    continue
                self._open[call.make()] = call
                self._again(call.key)
            except exceptions.RayTaskError as error:
                yield Ended(call.key, error=error.cause, attempts=call.attempts)
            except exceptions.RayError as error:
                yield Ended(call.key, error=error, attempts=call.attempts)

    def stop(self, key: str) -> None:
        """Kill a call under way, and those that it made; nothing is told of it any more."""
        for ref in [ref for ref, call in self._open.items() if call.key == key]:
            del self._open[ref]
            ray.cancel(ref, force=True)
            ray.wait([ref], timeout=PATIENCE)

    def close(self) -> None:
        """Interrupt what runs, wait until it has cleaned up, and kill what has not."""
        open_ = list(self._open)
        self._open.clear()
        for ref in open_:
            ray.cancel(ref)
        late = ray.wait(open_, num_returns=len(open_), timeout=PATIENCE)[1] if open_ else []
        for ref in late:
            ray.cancel(ref, force=True)
