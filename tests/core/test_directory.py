"""The output appears whole or not at all; a killed run is continued only by the same work."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.core.errors import SourceError, Stopped, UsageError, WriteError
from bridge.core.output import journal
from bridge.core.output.directory import check_disk, check_file_free, output_directory, partial_directory
from bridge.core.output.names import CALIBRATION
from bridge.core.output.replace import make_visible, work_directory
from bridge.core.output.temporary import write_whole


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


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped(15), MemoryError(), SourceError("its server")])
def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path, error: BaseException) -> None:
    if isinstance(error, SourceError):
        error.__cause__ = TimeoutError()
    with pytest.raises(type(error)) as stopped, output_directory(tmp_path / "model", "a") as work:
        work.mark("x", {"sum": 1})
        raise error
    (note,) = stopped.value.__notes__
    assert str(tmp_path / ".model.partial") in note and "--no-resume" in note
    with output_directory(tmp_path / "model", "a") as work:
        assert work.done == {"x": {"sum": 1}}


def test_an_interrupted_run_keeps_its_calibration(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), output_directory(tmp_path / "model", "a") as work:
        (work.directory / CALIBRATION).parent.mkdir()
        (work.directory / CALIBRATION).write_text("statistics")
        raise KeyboardInterrupt
    with output_directory(tmp_path / "model", "a") as work:
        assert (work.directory / CALIBRATION).read_text() == "statistics"


def test_an_error_that_makes_the_work_worthless_removes_it(tmp_path: Path) -> None:
    with pytest.raises(SourceError), output_directory(tmp_path / "model", "a") as work:
        work.mark("x", {})
        raise SourceError("a shard is damaged")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("resume", "how"), [(True, "the same command"), (False, "the command without resume=False (--no-resume)")]
)
def test_a_full_disk_keeps_what_is_done(resume: bool, how: str, tmp_path: Path) -> None:
    opened = output_directory(tmp_path / "model", "a", resume=resume)
    with pytest.raises(WriteError, match=r"the disk is full\. Free") as told, opened as work:
        work.mark("x", {"sum": 1})
        raise OSError(errno.ENOSPC, "No space left on device")
    (note,) = told.value.__notes__
    assert str(tmp_path / ".model.partial") in note and how in note
    with output_directory(tmp_path / "model", "a") as work:
        assert work.done == {"x": {"sum": 1}}


def test_a_full_disk_that_a_stage_named_keeps_what_is_done(tmp_path: Path) -> None:
    with (
        pytest.raises(WriteError, match="the calibration cannot be written") as told,
        output_directory(tmp_path / "model", "a") as work,
    ):
        work.mark("x", {})
        raise WriteError("the calibration cannot be written") from OSError(errno.EDQUOT, "Disk quota exceeded")
    assert str(tmp_path / ".model.partial") in told.value.__notes__[0] and names(tmp_path) == [".model.partial"]


def test_half_a_line_of_the_journal_is_nothing_to_keep(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as told, output_directory(tmp_path / "model", "a") as work:
        work.journal.write('{"done": "x", "to')
        raise KeyboardInterrupt
    assert not hasattr(told.value, "__notes__") and names(tmp_path) == []


def test_a_full_disk_is_one_clear_error_and_leaves_nothing_unfinished(tmp_path: Path) -> None:
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


def test_a_linked_output_is_replaced_where_the_link_leads(tmp_path: Path) -> None:
    """A link to a larger disk: the work is done there, too, so that publishing is a rename."""
    (tmp_path / "disk").mkdir()
    out, real = tmp_path / "model", tmp_path / "disk" / "model-1"
    out.symlink_to(Path("disk", "model-1"))
    with pytest.raises(WriteError, match="a symbolic link to nothing"), output_directory(out, "a"):
        pytest.fail("entered")
    real.mkdir()
    (real / "bridge.json").write_text("{}")
    with output_directory(out, "a", overwrite=True) as work:
        (work.directory / "new").write_text("1")
        assert work.directory == tmp_path / "disk" / ".model-1.partial"
    assert out.is_symlink() and names(real) == ["new"]
    assert (names(tmp_path), names(tmp_path / "disk")) == (["disk", "model"], ["model-1"])


def test_a_linked_file_is_written_where_the_link_leads(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "a.toml").symlink_to(tmp_path / "disk" / "b.toml")
    write_whole(tmp_path / "a.toml", b"1")
    assert (tmp_path / "a.toml").is_symlink() and (tmp_path / "disk" / "b.toml").read_bytes() == b"1"


def test_two_runs_into_one_directory_are_refused(tmp_path: Path) -> None:
    with output_directory(tmp_path / "model", "a") as work:
        with pytest.raises(WriteError, match="another run"), output_directory(tmp_path / "model", "a"):
            pytest.fail("entered")
        (work.directory / "x").write_text("1")
    assert names(tmp_path / "model") == ["x"]


@pytest.mark.parametrize("opened", [output_directory, partial_directory])
def test_a_place_that_cannot_be_written_is_not_taken_for_that_of_another_run(opened: Any) -> None:
    """/proc refuses new directories, of the superuser too."""
    with pytest.raises(WriteError, match=r"/proc/\S+ cannot be written: No such file"), opened(Path("/proc/a"), "a"):
        pytest.fail("entered")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"/proc/a\.toml: a recipe cannot be written there: No such file"):
        check_file_free(Path("/proc/a.toml"), False, "a recipe", ".toml")
    (tmp_path / "a.toml").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        check_file_free(tmp_path / "a.toml", True, "a recipe", ".toml")
    (tmp_path / "a.toml").rmdir()
    check_file_free(tmp_path / "a.toml", False, "a recipe", ".toml")
    assert names(tmp_path) == []


def kill_inside(out: Path, identity: str) -> None:
    """Die by SIGKILL inside the block, after one tensor was finished."""
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom bridge.core.output.directory import output_directory\n"
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
        with (
            pytest.raises(WriteError, match="another program wrote it"),
            output_directory(tmp_path / "model", "a", resume=resume),
        ):
            pytest.fail("entered")
    assert (theirs / "precious").read_text() == "1"


def test_a_disk_that_is_too_small_is_known_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r" free, the plan needs 1\.15e\+06 TB: "):
        check_disk(tmp_path / "model", 1 << 60)


def test_a_small_disk_is_told_in_its_own_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_500))
    with pytest.raises(WriteError, match=r" has 1\.5 kB free, the plan needs 2\.36 MB: "):
        check_disk(tmp_path / "model", 2_360_000)


def test_a_journal_torn_twice_is_still_read(tmp_path: Path) -> None:
    kill_inside(tmp_path / "model", "a")
    journal = tmp_path / ".model.partial" / "journal.jsonl"
    for name in ("y", "z"):
        with journal.open("a") as file:
            file.write('{"done": "torn')
        with pytest.raises(SystemExit), output_directory(tmp_path / "model", "a") as work:
            work.mark(name, {})
            raise SystemExit
    with output_directory(tmp_path / "model", "a") as work:
        assert sorted(work.done) == ["x", "y", "z"]


@pytest.mark.parametrize("cut", [1, 2])
def test_an_interrupt_while_an_output_is_replaced_leaves_the_old_one(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model"
    with output_directory(out, "a") as work:
        (work.directory / "bridge.json").write_text("old")
    renames, real = [cut], Path.rename

    def interrupted(self: Path, to: Path) -> Path:
        renames[0] -= 1
        if not renames[0]:
            raise KeyboardInterrupt
        return real(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), output_directory(out, "b", overwrite=True) as work:
        (work.directory / "bridge.json").write_text("new")
    assert names(tmp_path) == ["model"]
    assert (out / "bridge.json").read_text() == "old"


@pytest.mark.parametrize("seen", [False, True])
def test_an_interrupt_at_the_end_leaves_the_whole_output_or_nothing(
    seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, other = tmp_path / "model", work_directory(tmp_path / "model") / "of another run"

    def interrupted(*arguments: Any) -> None:
        if seen:
            make_visible(*arguments)
            other.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("bridge.core.output.directory.make_visible", interrupted)
    with pytest.raises(KeyboardInterrupt), output_directory(out, "a") as work:
        (work.directory / "x").write_text("1")
    assert names(tmp_path) == ([other.parent.name, "model"] if seen else [])
    assert not seen or (names(out) == ["x"] and other.exists())


def test_a_failure_removes_the_parents_that_it_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), output_directory(tmp_path / "a" / "b" / "model", "a"):
        raise ValueError("broken")
    assert names(tmp_path) == []


def test_a_journal_that_the_disk_does_not_take_is_a_full_disk(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(WriteError, match="nothing was kept"), output_directory(tmp_path / "model", "a") as work:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
            for _ in range(9):
                work.mark("x" * 50, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == []


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_killed_while_it_cleans_up_leaves_nothing_to_go_on_from(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files go one by one: a journal that outlives them would call what is gone done."""

    class Killed(BaseException):
        pass

    def die(*args: object, **more: object) -> None:
        raise Killed

    out = tmp_path / "out"
    with pytest.raises(Killed), output_directory(out, "same", resume=resume) as work:
        (work.directory / "weights").write_text("whole")
        work.mark("weights", {})
        monkeypatch.setattr(shutil, "rmtree", die)
        raise RuntimeError
    monkeypatch.undo()
    (work_directory(out) / "weights").unlink()
    with output_directory(out, "same") as work:
        assert not work.done


def test_a_run_killed_while_it_begins_anew_leaves_what_the_next_one_begins_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the files of the first run lies a journal all the time, or they would be nobody's."""

    class Killed(BaseException):
        pass

    def die(*args: object) -> None:
        raise Killed

    kill_inside(tmp_path / "model", "a")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(json, "dumps", die)
        with output_directory(tmp_path / "model", "a", resume=False):
            pytest.fail("entered")
    assert names(tmp_path / ".model.partial") == ["journal.jsonl", "x"]
    with output_directory(tmp_path / "model", "a", resume=False) as work:
        assert names(work.directory) == ["journal.jsonl"]


@pytest.mark.parametrize("line", [b"{}\n", b'{"done": 5}\n', b"\xff\xfe\n"])
def test_a_damaged_journal_is_one_clear_error(line: bytes, tmp_path: Path) -> None:
    kill_inside(tmp_path / "out", "one")
    path = work_directory(tmp_path / "out") / journal.JOURNAL
    path.write_bytes(path.read_bytes() + line)
    with (
        pytest.raises(WriteError, match=r"journal\.jsonl is damaged"),
        output_directory(tmp_path / "out", "one"),
    ):
        pass


def test_what_appears_at_out_keeps_a_journal_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(WriteError, match="kept in"), output_directory(out, "one") as work:
        (work.directory / "bridge.json").write_text("{}")
        out.mkdir()
        (out / "journal.jsonl").write_text("somebody's\n")
    assert (out / "journal.jsonl").read_text() == "somebody's\n"
