"""Schedules: due, next due, no end, never."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bridge.workflows.inspect.routes import Schedule
from bridge.workflows.inspect.te.options import parse_schedule
from bridge.workflows.inspect.te.where import Where


def parse(**words: Any) -> Schedule:
    where = Where("here")
    schedule = parse_schedule(words, where)
    assert not where.problems.lines(), where.problems.lines()
    return schedule


def problem(**words: Any) -> str:
    where = Where("here")
    parse_schedule(words, where)
    return "\n".join(where.problems.lines())


def test_without_words_every_step_is_due() -> None:
    assert all(parse().due(step) for step in range(5))
    assert parse().next_due(7) == 8


def test_minus_one_is_no_end_not_never() -> None:
    assert parse(start_step=2, end_step=-1).due(1000)
    assert parse(start_end_list=[[0, 1], [10, -1]]).next_due(1) == 10
    assert parse(start_end_list=[[0, 1], [10, -1]]).due(10**6)


def test_both_ends_are_included_and_freq_counts_from_step_0() -> None:
    schedule = parse(freq=3, start_step=4, end_step=9)
    assert [step for step in range(20) if schedule.due(step)] == [6, 9]


def test_a_list_replaces_start_and_end() -> None:
    assert not parse(start_end_list=[[3, 4]], start_step=0, end_step=9).due(2)
    assert parse(start_end_list=[], start_step=2).due(3)  # an empty one is none, as upstream


@pytest.mark.parametrize(
    "words",
    [
        {"start_step": 5, "end_step": 3},
        {"freq": 4, "start_step": 5, "end_step": 7},
        {"freq": 7, "start_end_list": [[1, 3], [8, 13]]},
    ],
)
def test_a_schedule_that_is_never_due_is_an_error(words: dict[str, Any]) -> None:
    assert "here: never due" in problem(**words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"freq": 0}, "freq = 0; expected a whole number from 1 on"),
        ({"freq": 2.0}, "freq = 2.0"),
        ({"freq": True}, "freq = True"),
        ({"start_step": -2}, "start_step = -2; expected a whole number from 0 on"),
        ({"end_step": -2}, "end_step = -2; expected a whole number from 0 on, or -1 for no end"),
        ({"end_step": "10"}, "end_step = '10'"),
        ({"start_end_list": 3}, "start_end_list = 3; expected a list of pairs"),
        ({"start_end_list": [[5, 3]]}, "start_end_list: [5, 3]; expected a first step and a last one"),
        ({"start_end_list": [[1, 2, 3]]}, "start_end_list: [1, 2, 3]"),
        ({"start_end_list": [7]}, "start_end_list: 7"),
    ],
)
def test_a_wrong_word_is_named(words: dict[str, Any], text: str) -> None:
    assert text in problem(**words)


def test_next_due_is_the_first_due_step_after() -> None:
    numbers = random.Random(0)
    for _ in range(300):
        schedule = some(numbers)
        due = [step for step in range(200) if schedule.due(step)]
        for step in range(-1, 60):
            following = next((later for later in due if later > step), None)
            assert schedule.next_due(step) == following, (schedule, step)


def test_two_meet_if_a_step_is_due_for_both() -> None:
    numbers = random.Random(1)
    met = 0
    for _ in range(500):
        one, other = some(numbers), some(numbers)
        both = any(one.due(step) and other.due(step) for step in range(200))
        assert one.meets(other) == other.meets(one) == both, (one, other)
        met += both
    assert 100 < met < 400


def some(numbers: random.Random) -> Schedule:
    """A schedule with intervals below 60, the last of which may have no end."""
    intervals: list[tuple[int, int | None]] = []
    for _ in range(numbers.randint(1, 3)):
        first = numbers.randint(0, 40)
        intervals.append((first, first + numbers.randint(0, 12)))
    if numbers.random() < 0.2:
        intervals.append((numbers.randint(0, 40), None))
    return Schedule(numbers.randint(1, 9), tuple(intervals))
