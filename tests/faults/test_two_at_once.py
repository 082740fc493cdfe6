"""Two runs of one command into one output, begun at the same moment: one wins, the other says so."""

from __future__ import annotations

import pytest

from tests.faults.commands import named
from tests.faults.stand import Stand
from tests.faults.struck import contents, differing, left, left_over

ROUNDS = 5
LOSES = ("another run", "exists already")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf", "hf over an old one", "golden record", "golden record over an old one"])
def test_of_two_runs_at_once_one_wins(name: str, stand: Stand) -> None:
    command, wrong = named(name), []
    wanted = stand.calm(command).out
    for number in range(ROUNDS):
        place, argv = stand.place(command)
        ended = stand.run(command, place, argv, copies=2)
        both = [(ended.code, ended.said), *map(tuple, ended.others)]
        if not any(code == 0 for code, _ in both):
            wrong.append(f"{number}: nobody won: {both}")
        for code, said in both:
            if code and not (code == 1 and any(word in said for word in LOSES) and len(said.splitlines()) == 1):
                wrong.append(f"{number}: the other ended with {code}: {said}")
        if names := differing(contents(place / "out"), wanted):
            wrong.append(f"{number}: other bytes in {names}")
        if over := left_over(place):
            wrong.append(f"{number}: left over: {over}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_checks_of_one_golden_at_once_do_not_meet(stand: Stand) -> None:
    command = named("golden check of a new conversion")
    for _ in range(5):
        place, argv = stand.place(command)
        ended = stand.run(command, place, argv, copies=3)
        assert [(ended.code, ended.said), *map(tuple, ended.others)] == [(0, "")] * 3
        assert left(place) == []
