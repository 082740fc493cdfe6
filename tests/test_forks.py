"""Forks of a process that has imported everything behave as programs that were started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forks

pytestmark = pytest.mark.slow  # the server imports for ten seconds


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("print(1)\nimport sys; print(2, file=sys.stderr)", 0, "2\n1\n"),
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("def f(", 1, "SyntaxError"),
        ("import os, pathlib; pathlib.Path('made').touch(); print(os.environ['GIVEN'], __name__)", 0, "x __main__\n"),
        ("import atexit; atexit.register(print, 'end')", 0, "end\n"),
        (
            "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()",
            0,
            "late\n",
        ),
    ],
)
def test_code_runs_as_a_program(
    code: str, exit_code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "x")
    found = forks.python(code, tmp_path, 60)
    assert found == (exit_code, said) if said.endswith("\n") or not said else said in found[1] and found[0] == exit_code
    assert (tmp_path / "made").exists() == ("made" in code)


def test_nothing_of_one_program_is_seen_by_the_next(tmp_path: Path) -> None:
    assert forks.python("import bridge, os; bridge.leak = x = 1; os.environ['LEAK'] = '1'", tmp_path, 60) == (0, "")
    code = "import bridge, os; print(hasattr(bridge, 'leak'), 'x' in globals(), 'LEAK' in os.environ)"
    assert forks.python(code, tmp_path, 60) == (0, "False False False\n")


def test_what_takes_too_long_is_killed(tmp_path: Path) -> None:
    code, _ = forks.python("import time; time.sleep(60)", tmp_path, 0.2)
    assert code == -9


def test_several_run_at_once_each_with_its_environment(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nopen(os.environ['RANK'], 'w').close()\n"
        "while not all(map(os.path.exists, '01')): time.sleep(0.01)\nprint(*sys.argv, os.environ['RANK'])"
    )
    environments = [{"RANK": "0"}, {"RANK": "1"}]
    assert forks.together(code, tmp_path, 60, ["given"], environments) == [(0, "-c given 0\n"), (0, "-c given 1\n")]


def test_the_command_gives_its_exit_code_and_output(tmp_path: Path) -> None:
    code, said = forks.qbridge(["plan", "nowhere", "--target", "hf"], tmp_path, 60)
    assert code == 1 and "nowhere" in said
    assert forks.qbridge(["plan"], tmp_path, 60)[0] == 2
