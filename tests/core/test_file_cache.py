"""What was read from a file is read again once the file has changed, and no caller can change what others get."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.core.errors import TableError
from bridge.core.mappings import read_table
from bridge.core.parsing.file_cache import cached_by_file
from bridge.quant.schemes.grammar import read_toml

HOUR = 3600 * 10**9


def write(path: Path, text: str, hours_ago: int) -> Path:
    path.write_text(text, encoding="utf-8")
    then = time.time_ns() - hours_ago * HOUR
    os.utime(path, ns=(then, then))
    return path


@pytest.fixture
def reads(tmp_path: Path) -> tuple[Callable[[Path], str], list[Path]]:
    seen: list[Path] = []

    @cached_by_file
    def read(path: Path) -> str:
        seen.append(path)
        return path.read_text(encoding="utf-8")

    return read, seen


def test_a_file_is_read_once_until_its_time_changes(tmp_path: Path, reads: Any) -> None:
    read, seen = reads
    path = write(tmp_path / "a.toml", "old", hours_ago=2)
    assert [read(path), read(path)] == ["old", "old"] and len(seen) == 1
    assert read(write(path, "new", hours_ago=1)) == "new"


def test_a_file_is_read_again_if_its_size_changes(tmp_path: Path, reads: Any) -> None:
    read, _ = reads
    path = write(tmp_path / "a.toml", "old", hours_ago=2)
    before = path.stat()
    assert read(path) == "old"
    path.write_text("longer", encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(path) == "longer"


def test_a_file_just_written_is_not_remembered(tmp_path: Path, reads: Any) -> None:
    read, _ = reads
    path = tmp_path / "a.toml"
    for text in ("one", "two", "six"):  # of one size, and within a step of a file system's clock
        path.write_text(text, encoding="utf-8")
        assert read(path) == text


def test_an_error_is_not_remembered(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "x =", hours_ago=2)
    for _ in range(2):
        with pytest.raises(TableError, match="not valid TOML"):
            read_table(path)
    with pytest.raises(TableError, match="cannot be read"):
        read_table(tmp_path / "none.toml")


@pytest.mark.parametrize("read", [lambda path: read_table(path).data, read_toml], ids=["table", "scheme"])
def test_no_caller_changes_what_the_next_one_reads(tmp_path: Path, read: Callable[[Path], dict[str, Any]]) -> None:
    path = write(tmp_path / "a.toml", 'list = [{ a = 1 }]\n[section]\nkey = "value"\n', hours_ago=2)
    first = read(path)
    first["list"][0]["a"] = 2
    first["list"].append(3)
    first["section"].clear()
    assert read(path) == {"list": [{"a": 1}], "section": {"key": "value"}}
