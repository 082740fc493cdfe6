"""Signals, early readers and closed streams: one line, the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_cli import CONVERT


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_unwinds_and_removes_what_is_half_written(number: int, code: int, tmp_path: Path) -> None:
    script = f"""
import time, bridge
from bridge.cli.main import VERBS, app
from bridge.core.output.directory import output_directory
from pathlib import Path
def convert(*args, **kwargs):
    with output_directory(Path({str(tmp_path / "out")!r}), "id") as work:
        (work.directory / "model.onnx").write_text("half")
        Path({str(tmp_path / "ready")!r}).touch()
        time.sleep(60)
bridge.convert = convert
app({CONVERT!r})
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if (tmp_path / "ready").exists():
            break
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, len(said.splitlines())) == (code, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


@pytest.mark.parametrize("module", ["bridge.cli.main", "typing", "click", "bridge.cli.terminal"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_command_is_imported_is_one_line(module: str, number: signal.Signals, code: int) -> None:
    script = f"""
import os, sys
class Strike:
    def find_spec(name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
assert {module!r} not in sys.modules
sys.meta_path.insert(0, Strike)
sys.argv[1:] = ["show", "schemes"]
from bridge.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    said = f"stopped by {number.name}; nothing half-written is left\n"
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["show schemes", "show nothing-of-that-name"])
def test_a_ctrl_c_after_the_verb_disturbs_no_callback_and_no_exit_code(verb: str) -> None:
    script = f"""
import atexit, os, sys
def callback(name, number):
    if number:
        os.kill(os.getpid(), number)
    print(name, file=sys.stderr)
atexit.register(callback, "last", 0)
atexit.register(callback, "struck", {signal.SIGINT.value})
sys.argv[1:] = {verb.split()!r}
from bridge.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if "nothing" in verb else 0)
    assert done.stderr.splitlines()[-2:] == ["struck", "last"] and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_sigterm_after_the_verb_ends_the_process_as_any_other() -> None:
    script = f"""
import atexit, os, sys
atexit.register(lambda: os.kill(os.getpid(), {signal.SIGTERM.value}))
sys.argv[1:] = ["show", "schemes"]
from bridge.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
