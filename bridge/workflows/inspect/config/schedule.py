"""Steps at which a feature of a config is due."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.core.parsing.problems import Problems
from bridge.core.text import described

KEYS = ("freq", "start_step", "end_step", "start_end_list")
NO_END = -1  # as the documentation of nvdlfw-inspect has it; TransformerEngine's code takes it for "never"

Interval = tuple[int, int | None]  # first and last step, both included; None: without an end


@dataclass(frozen=True)
class Schedule:
    """Due at the multiples of `freq` in any of the intervals; `freq` counts from step 0."""

    freq: int = 1
    intervals: tuple[Interval, ...] = ((0, None),)

    def due(self, step: int) -> bool:
        """Whether the feature runs at this step.

        >>> [step for step in range(9) if Schedule(2, ((3, 6),)).due(step)]
        [4, 6]
        """
        return step % self.freq == 0 and any(first <= step and _before(step, last) for first, last in self.intervals)

    def next_due(self, step: int) -> int | None:
        """The first step after `step` at which the feature runs; None if there is none.

        >>> Schedule(2, ((3, 6),)).next_due(-1), Schedule(2, ((3, 6),)).next_due(6)
        (4, None)
        """
        firsts = ((_multiple(max(step + 1, first), self.freq), last) for first, last in self.intervals)
        return min((first for first, last in firsts if _before(first, last)), default=None)

    def meets(self, other: Schedule) -> bool:
        """Whether both are due at the same step, at least once.

        >>> Schedule(2).meets(Schedule(3)), Schedule(4, ((1, 9),)).meets(Schedule(6, ((1, 9),)))
        (True, False)
        """
        every = math.lcm(self.freq, other.freq)
        return any(
            _before(both := _multiple(max(a, b), every), a_end) and _before(both, b_end)
            for a, a_end in self.intervals
            for b, b_end in other.intervals
        )


def parse_schedule(words: Mapping[str, Any], where: str, problems: Problems, *, excluded: bool = False) -> Schedule:
    """Return the schedule of a feature's options; its problems are recorded.

    `excluded`: the end of a pair in `start_end_list` is not part of it, as in nvdlfw-inspect's own feature.
    """
    before = problems.places
    freq = _step(words, "freq", 1, where, problems, least=1)
    pairs = words.get("start_end_list")
    if pairs:
        intervals = _pairs(pairs, where, problems, excluded)
    else:
        first = _step(words, "start_step", 0, where, problems)
        last = _step(words, "end_step", NO_END, where, problems, least=NO_END)
        intervals = [(first, None if last == NO_END else last)]
    schedule = Schedule(freq, tuple(sorted(intervals, key=lambda ends: ends[0])))
    if problems.places == before and schedule.next_due(-1) is None:
        steps = ", ".join(f"{first} to {last}" for first, last in schedule.intervals)
        problems.add(
            f"{where}: never due: no step from {steps} is a multiple of freq = {freq}, which counts from step 0"
        )
        return Schedule()
    return schedule if problems.places == before else Schedule()


def _pairs(pairs: Any, where: str, problems: Problems, excluded: bool) -> list[Interval]:
    if not isinstance(pairs, list | tuple):
        problems.add(
            f"{where}: start_end_list = {described(pairs)}; expected a list of pairs, as in [[0, 20], [80, 100]]"
        )
        return []
    intervals: list[Interval] = []
    for pair in pairs:
        match pair:
            case [int(first), int(last)] if first >= 0 and (last == NO_END or last >= first + excluded):
                intervals.append((first, None if last == NO_END else last - excluded))
            case _:
                problems.add(
                    f"{where}: start_end_list: {list(pair) if isinstance(pair, list | tuple) else described(pair)}; "
                    f"expected a first step and a last one that is not before it, or {NO_END} for no end"
                )
    return intervals


def _step(words: Mapping[str, Any], key: str, otherwise: int, where: str, problems: Problems, least: int = 0) -> int:
    value = words.get(key)
    if value is None:
        return otherwise
    if type(value) is not int or value < least:
        end = f", or {NO_END} for no end" if least == NO_END else ""
        problems.add(f"{where}: {key} = {described(value)}; expected a whole number from {max(least, 0)} on{end}")
        return otherwise
    return value


def _multiple(step: int, freq: int) -> int:
    """The first multiple of `freq` from `step` on."""
    return -(-step // freq) * freq


def _before(step: int, last: int | None) -> bool:
    return last is None or step <= last
