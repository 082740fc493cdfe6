"""A time of day that jumps, for every other command a year back, else a day forward: the same bytes, no wait."""

from __future__ import annotations

import io
import itertools
import random

import pytest

from bridge.cli.terminal import _bars
from bridge.core.progress import BYTES
from tests.faults.commands import COMMANDS, Command
from tests.faults.stand import Stand
from tests.faults.struck import contents, differing

DAY = 86_400
SEED = 6
SLOW = ("trt", "hf, calibrated")  # what they write passes through the same files as the output of the others


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, id=c.name, marks=pytest.mark.product if c.name in SLOW else ()) for c in COMMANDS if not c.kinds],
)
def test_a_clock_that_jumps_changes_no_byte(command: Command, stand: Stand) -> None:
    calm, drawn = stand.calm(command), random.Random(f"{SEED} {command.name}")
    offset, at = (DAY, -400 * DAY)[COMMANDS.index(command) % 2], drawn.randrange(1, calm.calls)
    place, argv = stand.place(command)
    ended = stand.run(command, place, argv, at=at, action="clock", number=offset)
    assert ended.code == 0, ended.said
    names = differing(undated(contents(place / "out")), undated(calm.out))
    assert names == [], f"seed {SEED}, {offset} s from call {at} on"


def undated(found: dict[str, bytes]) -> dict[str, bytes]:
    """A golden's history has the day on which it changed."""
    found = dict(found)
    if "golden.json" in found:
        found["golden.json"] = b"\n".join(x for x in found["golden.json"].split(b"\n") if b'"date"' not in x)
    return found


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_bear_a_clock_that_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.cycle([1000.0, 1000.5, 1000.0 - DAY, 1000.0 + DAY])
    monkeypatch.setattr("rich.console.monotonic", lambda: next(times))
    terminal = Tty()
    with _bars(terminal, quiet=False) as tell:
        for done in range(0, 101, 5):
            tell(done, 100, BYTES[0])
            tell(0, 0, "the graph is made")
    assert BYTES[0] in terminal.getvalue()
