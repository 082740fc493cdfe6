"""`qbridge cache`: what lies there, how old it is, and that it is gone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from bridge.cli.cache import age
from bridge.cli.main import app
from bridge.core.output import cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "qbridge"


def lines(*words: str) -> list[str]:
    result = CliRunner().invoke(app, ["cache", *words])
    assert result.exit_code == 0, result.output
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]


def test_it_lists_what_is_kept_and_removes_it(folder: Path) -> None:
    assert lines() == [f"{folder}: 0 files, 0 B"]
    cache.store("graphs", cache.digest_of("a"), "LlamaForCausalLM, 22 layers", bytes(40_000))
    (path,) = (folder / "graphs").iterdir()
    os.utime(path, (0, time.time() - 7300))
    head, row, total = lines()
    assert head.split("  ")[0] == "kept"
    assert row.split("  ")[0] == "ONNX graphs without weights"
    assert "LlamaForCausalLM, 22 layers" in row
    assert "40.2 kB" in row
    assert row.endswith("2 hours ago")
    assert total == f"{folder}: 1 file, 40.2 kB"
    assert cache.digest_of("a")[:8] in row
    (entry,) = json.loads("".join(lines("--json")))
    assert (entry["kind"], entry["what"], entry["path"]) == ("graphs", "LlamaForCausalLM, 22 layers", str(path))
    assert lines("--clear") == [f"{folder}: removed 1 file, 40.2 kB"]
    assert lines() == [f"{folder}: 0 files, 0 B"]


def test_removing_says_in_json_what_was_removed(folder: Path) -> None:
    cache.store("graphs", cache.digest_of("a"), "LlamaForCausalLM, 22 layers", b"content")
    (listed,) = json.loads("".join(lines("--json")))
    assert json.loads("".join(lines("--clear", "--json"))) == {"removed": [listed]}
    assert json.loads("".join(lines("--clear", "--json"))) == {"removed": []}
    assert lines() == [f"{folder}: 0 files, 0 B"]


@pytest.mark.parametrize("words", [(), ("--clear",)])
def test_a_user_without_a_home_directory_reads_words(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    (line,) = lines(*words)
    assert line == "nothing is kept: this user has no home directory; set XDG_CACHE_HOME to a directory"


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert lines() == [f"nothing is kept: {tmp_path / 'file'} is not a directory"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert lines() == [f"nothing is kept: {tmp_path} cannot be written"]
    assert json.loads("".join(lines("--json"))) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "now"),
        (59, "now"),
        (60, "1 minute ago"),
        (7300, "2 hours ago"),
        (86399, "23 hours ago"),
        (9e5, "10 days ago"),
    ],
)
def test_an_age_is_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert age(seconds) == text
