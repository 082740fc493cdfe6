"""Weights of remote files, the way that costs least: in blocks that are asked for ahead, or straight from an answer.

Where one connection keeps up with its reader, asking ahead gains nothing, and a block is one copy more, a third of the
time. An answer is then read into the reader's memory as it comes, to the end of the tensor. Nothing of it is kept:
once a tensor is asked for again that might have been, all comes in blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.remote.blocks import BLOCK, Blocks
from bridge.remote.place import PAGE

if TYPE_CHECKING:
    from bridge.remote.client import Flow

LONGEST = 32 << 20  # bytes of an answer; after each it is seen anew whether one connection keeps up
OPEN = 32  # answers of which a part was read: two readers of matrices that lie in sixteen files each

Begin = Callable[[str, int, int], "Flow | None"]  # a run of a file's bytes; None where its store has none


@dataclass(eq=False)
class _Run:
    """An answer of which more is to be read, by any thread; `busy` while one does."""

    name: str
    begin: int
    end: int
    flow: Flow
    busy: bool = True
    nbytes: int = 0
    seconds: float = 0.0


class WeightReader:
    """Any run of bytes of any file, by any number of threads, which each go through a tensor, or a part of one."""

    def __init__(self, begin: Begin | None, blocks: Blocks, pages: Blocks) -> None:
        self._begin, self._blocks, self._pages = begin, blocks, pages
        self._lock = threading.Lock()
        self._runs: list[_Run] = []  # the least recently read first
        self._nbytes = 0  # that were read straight
        self._begun: dict[tuple[str, int], int] = {}  # where an answer began -> `_nbytes` then

    def read(self, name: str, nbytes: int, begin: int, end: int | None, out: memoryview) -> None:
        """Fill `out` with bytes of a file of `nbytes` from `begin` on, whose reader goes on to `end`, if known.

        Raises what fetching raises.
        """
        end = max(end, begin + len(out)) if end is not None and self._begin else None
        while len(out):
            if end is not None and (run := self._taken(name, begin, end)):
                part = out[: min(run.end - begin, BLOCK)]  # as much at once as the client's tries are meant for
                self._fill(run, part)
            elif end is not None and end - begin <= PAGE and self._is_straight(name, begin) and self._blocks.known:
                part = out
                self._pages.read(name, nbytes, begin, part)
            else:
                part = out[: BLOCK - begin % BLOCK]
                self._blocks.read(name, nbytes, begin, part, ahead=end is None or not self._blocks.swift)
            begin, out = begin + len(part), out[len(part) :]

    def give_up(self) -> None:
        """Fail what somebody waits for, and whatever is asked for until `go_on`; the store has given up already."""
        self._close_idle()
        self._blocks.give_up()

    def go_on(self) -> None:
        """Read again as if nothing had been."""
        self._close_idle()
        self._blocks.go_on()

    def _close_idle(self) -> None:
        with self._lock:
            idle = [run for run in self._runs if not run.busy]
            self._runs = [run for run in self._runs if run.busy]
        for run in idle:
            run.flow.close()

    def _taken(self, name: str, begin: int, end: int) -> _Run | None:
        """An answer whose next byte is that at `begin`, for this thread alone; None where it comes otherwise."""
        with self._lock:
            here = [run for run in self._runs if run.name == name]
            found = next((run for run in here if run.flow.at == begin and not run.busy), None)
            if found:
                found.busy = True
                return found
            longest = LONGEST if self._blocks.known else BLOCK
            if end - begin <= (PAGE if self._blocks.known else BLOCK // 2) or not self._is_straight(name, begin):
                return None
            others = [run.begin for run in here if run.begin > begin]  # whose readers go on from there
            return self._opened(name, begin, min(end, begin + longest, *others))

    def _is_straight(self, name: str, begin: int) -> bool:
        """Whether what is asked for next is not better taken from a block."""
        return self._blocks.swift and not self._blocks.holds(name, begin)

    def _opened(self, name: str, begin: int, end: int) -> _Run | None:
        """A new answer, in the place of the one that was left longest, where there are many."""
        before = self._begun.get((name, begin))
        if before is not None and self._nbytes - before <= self._blocks.held:
            self._blocks.hold()
            return None
        flow = self._begin(name, begin, end) if self._begin else None
        if not flow:
            self._begin = None
            return None
        if len(self._runs) >= OPEN and (spare := next((run for run in self._runs if not run.busy), None)):
            self._runs.remove(spare)
            spare.flow.close()
        self._runs.append(run := _Run(name, begin, end, flow))
        return run

    def _fill(self, run: _Run, out: memoryview) -> None:
        began, goes_on = time.perf_counter(), False
        try:
            run.flow.fill(out)
            run.seconds += time.perf_counter() - began
            run.nbytes += len(out)
            goes_on = run.flow.at < run.end
        finally:
            with self._lock:
                self._runs.remove(run)
                if goes_on:
                    run.busy = False
                    self._runs.append(run)
            if not goes_on:
                run.flow.close()
        with self._lock:
            self._begun.setdefault((run.name, run.begin), self._nbytes)
            self._nbytes += len(out)
        if not goes_on:
            self._blocks.took(run.nbytes, run.seconds)
