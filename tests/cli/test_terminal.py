"""On a terminal: bars while a verb works, and all of what it prints."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.cli.main import app
from bridge.cli.terminal import session
from bridge.core import progress_bar

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_of(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """The one terminal that stdout and stderr are; not a fixture, since pytest puts its own files there after those."""
    tty = Tty()
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, tty)
    return tty


@pytest.mark.parametrize("words", [["plan", str(MODEL), "--target", "hf"], ["batch", "batch.toml", "--dry-run"]])
def test_planning_is_told_on_a_terminal(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("batch.toml").write_text(f'row = [{{model = "{MODEL}", target = "hf", out = "out"}}]')
    screen = screen_of(monkeypatch)
    app(words, standalone_mode=False)
    assert "\x1b[2Kplan " in screen.getvalue()  # a bar: a line that is wiped


def test_bars_wipe_nothing_that_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch)
    with session() as terminal:
        for text in ("weights", "compare weights"):
            terminal.progress(1, 2, text)
        terminal.print("first line", "last line")
        terminal.progress(2, 2, "weights")
    drawn, _, after = screen.getvalue().partition("first line")
    assert "compare weights" in drawn
    assert "\x1b[1A" not in after  # the cursor up, to lines that are wiped


def test_what_a_library_had_begun_is_not_told_after_a_signal() -> None:
    code = """
import signal, sys
from bridge.cli.terminal import session
from bridge.core import progress_bar

async def asked():
    pass

with session():
    begun = asked()
    signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (143, "stopped by SIGTERM; nothing half-written is left\n")


def test_a_log_gets_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [100.0], list[str]()
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    log = progress_bar.LogLines(lines.append)
    for seconds, done, total, text in (
        (10, 1, 10, "calibrate"),
        (31, 4, 10, "calibrate"),
        (40, 9, 10, "calibrate"),
        (62, 0, 0, "plan"),
    ):
        now[0] = 100.0 + seconds
        log(done, total, text)
    assert lines == ["calibrate 40%\n", "plan\n"]
