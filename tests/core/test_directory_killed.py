"""What runs that were killed while they replaced an output left, and the next run settles."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest

from bridge.core.output import journal
from bridge.core.output.directory import output_directory
from bridge.core.output.replace import recover
from tests.core.test_directory import kill_inside, names


def test_after_another_start_of_the_machine_nothing_of_a_killed_run_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_inside(tmp_path / "model", "a")
    monkeypatch.setattr(journal, "_boot", lambda: "another")
    with output_directory(tmp_path / "model", "a") as work:
        assert not work.done
        assert names(work.directory) == ["journal.jsonl"]


def replaced_and_killed(out: Path) -> None:
    """What a run leaves that was killed right after its rename: its journal, and what it replaced."""
    out.mkdir()
    (out / "bridge.json").write_text("new")
    (out / "journal.jsonl").write_text('{"identity": "a"}\n')
    aside = out.parent / f".{out.name}.old"
    aside.mkdir()
    (aside / "bridge.json").write_text("old")


def test_what_a_run_killed_after_its_rename_had_to_remove_is_removed(tmp_path: Path) -> None:
    replaced_and_killed(tmp_path / "model")
    recover(tmp_path / "model")
    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == ["bridge.json"]


def test_a_run_that_lives_is_not_settled_by_another(tmp_path: Path) -> None:
    replaced_and_killed(tmp_path / "model")
    with (tmp_path / "model" / "journal.jsonl").open() as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        recover(tmp_path / "model")
    assert names(tmp_path) == [".model.old", "model"]


@pytest.mark.parametrize("text", ["", "mine\n", '{"done": "x"}\n'])
def test_a_journal_that_is_no_run_s_is_somebody_s_file(text: str, tmp_path: Path) -> None:
    replaced_and_killed(tmp_path / "model")
    (tmp_path / "model" / "journal.jsonl").write_text(text)
    recover(tmp_path / "model")
    assert (tmp_path / "model" / "journal.jsonl").read_text() == text


@pytest.mark.parametrize(("marked", "found"), [(True, ["bridge.json"]), (False, [])])
def test_the_old_output_is_put_back_only_while_it_is_whole(marked: bool, found: list[str], tmp_path: Path) -> None:
    kill_inside(tmp_path / "model", "a")
    aside = tmp_path / ".model.old"
    aside.mkdir()
    (aside / ("bridge.json" if marked else "rest")).write_text("old")
    recover(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").glob("*")] == found


def test_an_old_output_has_lost_its_mark_when_its_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, rmtree = [], shutil.rmtree

    def watched(path: Path, **options: Any) -> None:
        removed.extend(names(Path(path)) if Path(path).exists() else [])
        rmtree(path, **options)

    for content in ("old", "new"):
        with output_directory(tmp_path / "model", content, overwrite=True) as work:
            (work.directory / "bridge.json").write_text(content)
            (work.directory / "weights").write_text(content)
            monkeypatch.setattr(shutil, "rmtree", watched)
    assert removed == ["weights"]
