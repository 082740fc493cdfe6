"""The output appears whole or not at all; a killed run is continued only by the same work."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.errors import WriteError
from bridge.output import check_disk, output_directory


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    with output_directory(tmp_path / "model", "a") as work:
        (work.directory / "x").write_text("1")
        assert not (tmp_path / "model").exists()
    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == ["x"]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), output_directory(tmp_path / "model", "a") as work:
        (work.directory / "x").write_text("1")
        raise error
    assert names(tmp_path) == []


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="the disk is full"), output_directory(tmp_path / "model", "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert names(tmp_path) == []


def test_an_existing_output_is_refused_unless_bridge_wrote_it_and_overwrite_is_asked(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "mine").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(WriteError), output_directory(out, "a", overwrite=overwrite):
            pytest.fail("entered")
    assert (out / "mine").read_text() == "precious"
    (out / "bridge.json").write_text("{}")
    with output_directory(out, "a", overwrite=True) as work:
        (work.directory / "new").write_text("1")
    assert names(tmp_path) == ["model"]
    assert names(out) == ["new"]


def test_two_runs_into_one_directory_are_refused(tmp_path: Path) -> None:
    with output_directory(tmp_path / "model", "a") as work:
        with pytest.raises(WriteError, match="another run"), output_directory(tmp_path / "model", "a"):
            pytest.fail("entered")
        (work.directory / "x").write_text("1")
    assert names(tmp_path / "model") == ["x"]


def kill_inside(out: Path, identity: str) -> None:
    """Die by SIGKILL inside the block, after one tensor was finished."""
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom bridge.output import output_directory\n"
        f"with output_directory(Path({str(out)!r}), {identity!r}) as work:\n"
        "    (work.directory / 'x').write_text('1')\n    work.mark('x', {'policy': 'floor'})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_killed_run_is_continued_by_the_same_work(tmp_path: Path) -> None:
    kill_inside(tmp_path / "model", "a")
    with output_directory(tmp_path / "model", "a") as work:
        assert work.done == {"x": {"policy": "floor"}}
        assert (work.directory / "x").read_text() == "1"
    assert names(tmp_path / "model") == ["x"]


def test_leftovers_of_other_work_are_refused_and_discarded_on_request(tmp_path: Path) -> None:
    kill_inside(tmp_path / "model", "a")
    with pytest.raises(WriteError, match="not mixed in"), output_directory(tmp_path / "model", "b"):
        pytest.fail("entered")
    with output_directory(tmp_path / "model", "b", resume=False) as work:
        assert not work.done
        assert names(work.directory) == ["journal.jsonl"]


def test_somebody_elses_directory_is_not_wiped(tmp_path: Path) -> None:
    theirs = tmp_path / ".model.partial"
    theirs.mkdir()
    (theirs / "precious").write_text("1")
    for resume in (True, False):
        with pytest.raises(WriteError, match="not ours"), output_directory(tmp_path / "model", "a", resume=resume):
            pytest.fail("entered")
    assert (theirs / "precious").read_text() == "1"


def test_a_disk_that_is_too_small_is_known_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="GB free"):
        check_disk(tmp_path / "model", 1 << 60)
