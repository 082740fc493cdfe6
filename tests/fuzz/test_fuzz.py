"""1,000 attacks, always the same, on everything that reads a stranger's file: each a clean error or a correct result.

`make fuzz` runs 100,000, and new ones each time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import CI, attacked
from tests.fuzz.targets import NAMES, shares

ROOT = Path(__file__).parent.parent.parent
# What a process does that the cage must notice; each runs in one, since nothing takes an audit hook out again.
MISBEHAVING = {
    "writes": "open('x', 'w')",
    "removes": "import os; os.remove('no-such-file')",
    "runs": "import os; os.system('true')",
    "starts": "import subprocess; subprocess.run(['true'])",
    "fills the memory": "bytearray(200 << 20)",
    "computes for ever": "while True: pass",
    "hides that it computes for ever": "\nwhile True:\n    try:\n        while True: pass\n    except Exception: pass",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_stranger_s_file_is_read_correctly_or_refused(name: str, tmp_path: Path) -> None:
    cases = shares(CI)[name]
    found = attacked(name, cases, 0, "--keep", str(tmp_path))
    assert not found["failures"], "\n".join(found["failures"])
    assert found["cases"] >= cases
    assert found["read"] and found["refused"]


def test_shares_are_no_fewer_than_asked_for() -> None:
    assert sum(shares(CI).values()) >= CI
    assert sum(shares(100_000).values()) >= 100_000


@pytest.mark.slow
def test_malicious_files_do_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.fuzz.corpus"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == {}
    assert found["entries"] > 700


def ran(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, in `folder`: an audit hook stays for good."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def caged(what: str, seconds: float, loose: bool = False) -> str:
    """A program that does something in a cage, and prints what that noticed."""
    return (
        "from tests.fuzz import cage\n"
        f"cage.SECONDS = {seconds}\n"
        f"held = cage.Cage(loose={loose})\n"
        "try:\n"
        "    with held.holds(0):\n"
        f"        exec({what!r})\n"
        "except AssertionError as error:\n"
        "    print('noticed:', error)\n"
    )


@pytest.mark.parametrize("what", MISBEHAVING)
def test_cage_notices_what_a_reader_must_not_do(what: str, tmp_path: Path) -> None:
    done = ran(caged(MISBEHAVING[what], 0.3), tmp_path)
    assert done.stdout.startswith("noticed:"), done.stderr[-2000:]


@pytest.mark.slow
def test_first_cases_are_held_as_all_others(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from hypothesis import strategies as st\n"
        "from tests.fuzz import worker\n"
        "from tests.fuzz.case import Target\n"
        "def make(root): (root / 'a').write_bytes(b'valid')\n"
        "def read(root):\n"
        "    if (root / 'a').read_bytes() != b'valid': open(root / 'b', 'w').close()\n"
        "cases = lambda root: st.binary().map(lambda data: {'a': data})\n"
        "aim = Target('x', make, cases, read, lambda root, found: None, 'a')\n"
        "root = Path('model'); root.mkdir(); make(root)\n"
        "print(worker.run(aim, root, worker.WARM, 0, Path('kept'))[2])\n"
    )
    done = ran(program, tmp_path)
    assert "did what reading never does" in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
def test_loose_cage_ends_what_computes_for_ever(tmp_path: Path) -> None:
    done = ran(caged(MISBEHAVING["computes for ever"], 0.1, loose=True), tmp_path)
    assert done.stdout.startswith("noticed: took more than"), done.stderr[-2000:]
