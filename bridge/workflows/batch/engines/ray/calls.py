"""Calls in Ray processes, repeated if their process dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import exceptions

# The end of a process, whatever it runs: killed, out of memory, its node gone. Any other error comes from the call.
DIED = (
    exceptions.WorkerCrashedError,
    exceptions.LocalRayletDiedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.ObjectLostError,
)
INTERVAL = 0.2  # seconds between two polls of the running calls
CLEANUP = 30.0  # seconds that a cancelled call gets to clean up


@dataclass(frozen=True)
class Ended:
    """A finished call: its result, or its error; `died`: its process died, in each of `attempts`."""

    key: str
    result: Any = None
    error: BaseException | None = None
    died: bool = False
    attempts: int = 1


@dataclass
class _Call:
    key: str
    make: Callable[[], Any]
    attempts: int = 0


class Calls:
    """Calls by name. `retries`: how often a call is repeated after its process died; then `again` gets its name."""

    def __init__(self, retries: int, again: Callable[[str], None] = lambda key: None) -> None:
        self._retries, self._again = retries, again
        self._open: dict[Any, _Call] = {}

    def __len__(self) -> int:
        return len(self._open)

    def start(self, key: str, function: Callable[..., Any], *arguments: Any, **resources: float) -> None:
        """Call a function of a module when the cluster has `resources` free."""
        # Ray itself does not retry, since it would not report that.
        task = ray.remote(function).options(max_retries=0, **resources)
        self._make(_Call(key, partial(task.remote, *arguments)))

    def _make(self, call: _Call) -> None:
        """Make a call, for the first time or again."""
        call.attempts += 1
        self._open[call.make()] = call

    def ended(self) -> Iterator[Ended]:
        """Wait for a moment; yield the finished calls."""
        if not self._open:
            return
        ready, _ = ray.wait(list(self._open), num_returns=1, timeout=INTERVAL)
        for ref in ready:
            call = self._open.pop(ref)
            try:
                yield Ended(call.key, ray.get(ref), attempts=call.attempts)
            except DIED as error:
                if call.attempts > self._retries:
                    yield Ended(call.key, error=error, died=True, attempts=call.attempts)
                    continue
                self._make(call)
                self._again(call.key)
            except exceptions.RayTaskError as error:
                yield Ended(call.key, error=error.cause, attempts=call.attempts)
            except exceptions.RayError as error:
                yield Ended(call.key, error=error, attempts=call.attempts)

    def stop(self, key: str) -> None:
        """Kill a running call and the calls that it made; it is no longer reported."""
        for ref in [ref for ref, call in self._open.items() if call.key == key]:
            del self._open[ref]
            ray.cancel(ref, force=True)
            ray.wait([ref], timeout=CLEANUP)

    def close(self) -> None:
        """Interrupt running calls, wait until they have cleaned up, and kill those that have not."""
        refs = list(self._open)
        self._open.clear()
        for ref in refs:
            ray.cancel(ref)
        late = ray.wait(refs, num_returns=len(refs), timeout=CLEANUP)[1] if refs else []
        for ref in late:
            ray.cancel(ref, force=True)
