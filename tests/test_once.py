"""What all workers of a run share is made once, and seen only when it is whole."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests import once


def test_a_directory_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "ROOT", tmp_path)
    made = []
    for _ in range(2):
        found = once.directory("a/b c", lambda part: (made.append(1), (part / "file").write_text("x")))
        assert (found / "file").read_text() == "x"
    assert made == [1]
    assert found.parent == tmp_path


def test_a_directory_whose_making_fails_is_not_there_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "ROOT", tmp_path)

    def fails(part: Path) -> None:
        (part / "half").write_text("x")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        once.directory("name", fails)
    assert not (tmp_path / "name").exists()
    assert list(once.directory("name", lambda part: None).iterdir()) == []


def _make(root: Path) -> int:
    once.ROOT = root
    return int(once.value("number", lambda: (root / "calls").open("a").write("x")))


@pytest.mark.slow
def test_processes_that_ask_at_once_wait_for_the_first(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:  # a fork of this process may inherit a taken lock
        assert pool.map(_make, [tmp_path] * 8) == [1] * 8
    assert (tmp_path / "calls").read_text() == "x"


def test_every_caller_has_a_value_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "ROOT", tmp_path)
    first, second = (once.value("list", lambda: [1]) for _ in range(2))
    first.append(2)
    assert second == [1]
