"""AGENTS.md: its commands run as it says, and what it names is printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from bridge.cli import terminal
from bridge.core import errors
from tests import forks
from tests.blocks import blocks, prepare

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
NAMED = {
    "plan": {"memory", "disk", "estimate", "notes"},
    "convert": {"passed", "bytes", "source_bytes", "findings", "programs", "next"},
    "verify": {"passed", "bytes", "source_bytes", "findings", "programs", "next"},
}


def qbridge(words: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and stdout of a command."""
    code = (
        "import sys, contextlib\n"
        f"sys.argv = {['qbridge', *words]}\n"
        "from bridge.__main__ import main\n"
        "with open('stdout', 'w') as sys.stdout: main()\n"
    )
    ended, _ = forks.python(code, folder, 300)
    return ended, (folder / "stdout").read_text()


@pytest.mark.slow
def test_its_commands_print_json_with_what_it_names(tmp_path: Path) -> None:
    folder = prepare(tmp_path)
    lines = [line for block in blocks(TEXT) if block.language == "sh" for line in block.text.splitlines()]
    for line in lines:
        words = shlex.split(line)[1:]
        ended, said = qbridge(words, folder)
        found = json.loads(said)
        assert ended == 0, line
        assert NAMED.get(words[0], set()) <= set(found), line
        assert all(f"`{name}`" in TEXT or f"`{name}." in TEXT for name in NAMED.get(words[0], ()))
    assert [line.split()[1] for line in lines] == ["plan", "convert", "check", "verify"] and found["passed"]


@pytest.mark.slow
def test_an_error_leaves_stdout_empty_and_has_its_code(tmp_path: Path) -> None:
    words = ["plan", "examples/models/tiny-llama", "--target", "hf", "--quant", "int9", "--json"]
    assert qbridge(words, prepare(tmp_path)) == (errors.UsageError.exit_code, "")
    assert "0 done; 1 failed" in TEXT and "2 usage" in TEXT and "3 written" in TEXT
    assert (terminal.FAILED, errors.UsageError.exit_code, terminal.BELOW) == (1, 2, 3)
