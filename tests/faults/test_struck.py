"""A command is killed or stopped, its disk fills up or its source breaks: what is on the disk is whole.

Always the same points here; `make faults` strikes 200 of each kind, new ones each time.
"""

from __future__ import annotations

import errno
import signal
import subprocess
import sys

import pytest

from bridge.core.output.names import MANIFEST
from bridge.core.remote.upload_note import NOTE
from tests.covering import grid
from tests.faults import kinds
from tests.faults.commands import COMMANDS, named
from tests.faults.kinds import KINDS, shares, struck_by
from tests.faults.stand import Stand
from tests.faults.struck import complaints, contents, differing, left_over

SEED = 6
POINTS = {"kill": 30, "kill a worker": 2, "signal": 10, "full disk": 10, "read error": 10}  # of all commands together


@grid(
    {"kind": list(KINDS), "name": [command.name for command in COMMANDS]},
    valid=lambda kind, name: struck_by(kind, named(name)),
    later=lambda kind, name: name == "batch with one calibration",  # each of its runs imports ModelOpt in two processes
    first=[("kill", "hf"), ("kill", "hf over an old one"), ("kill", "trt"), ("signal", "hf"), ("full disk", "hf")],
)
def test_a_command_that_is_struck_leaves_whole_outputs_only(kind: str, name: str, stand: Stand) -> None:
    wrong = KINDS[kind](named(name), stand, shares(POINTS[kind], kind)[name], SEED)
    assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)


@pytest.mark.slow
def test_a_rename_that_fails_keeps_the_old_output_and_the_finished_work(stand: Stand) -> None:
    command = named("hf over an old one")
    wanted = stand.calm(command).out
    for which in (2, 3):  # after the one of the model card
        place, argv = stand.place(command)
        old = contents(place / "out")
        ended = stand.run(command, place, argv, at=which, action="fail", number=errno.EIO, classes=["rename"])
        assert complaints(ended, 1, "finished work is kept") == []
        assert differing(contents(place / "out"), old) == []
        assert stand.run(command, place, argv).code == 0
        assert differing(contents(place / "out"), wanted) == []
        assert left_over(place) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_a_verb_begins_ends_the_command_like_one_during_it(number: int) -> None:
    code = (
        f"import os, time, bridge.cli.main as cli\ncli.app = lambda: (os.kill(os.getpid(), {number}), time.sleep(30))\n"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}cli.main()"], capture_output=True, text=True, timeout=60)
    name = signal.Signals(number).name
    assert (done.returncode, done.stderr) == (128 + number, f"stopped by {name}; nothing half-written is left\n")


def test_marks_of_another_version_than_the_weights_make_a_wrong_model() -> None:
    old, new = ({"config.json": text, "model.safetensors": text, MANIFEST: text} for text in (b"old", b"new"))
    versions = (None, old, new)
    told = {NOTE: b"{}"}
    assert kinds._is_no_model(told | {"model.safetensors": b"half"}, versions)
    assert kinds._is_no_model(told | new, versions)
    assert not kinds._is_no_model(told | new | {"config.json": b"old"}, versions)
    assert not kinds._is_no_model(told | old | {MANIFEST: b"new"}, versions)
    assert not kinds._is_no_model(new, versions)


def test_every_command_gets_points_of_every_number() -> None:
    for kind in KINDS:
        for points in (1, 60, 200):
            given = shares(points, kind)
            assert sum(given.values()) >= points
            assert min(given.values()) >= 1
