"""What a killed run left among the temporary files goes with the next one; what lives, and what is not ours, stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.core.output.temporary import temporary_directory


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def killed(parent: Path) -> None:
    code = (
        "import os, signal\nfrom bridge.core.output.temporary import temporary_directory\n"
        f"with temporary_directory({str(parent)!r}) as here:\n"
        "    (here / 'big').touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert len(names(parent)) == 1


def test_it_is_gone_at_the_end_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), temporary_directory(tmp_path) as here:
        (here / "file").touch()
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_what_a_killed_run_left_goes_with_the_next_one(tmp_path: Path) -> None:
    killed(tmp_path)
    with temporary_directory(tmp_path) as here:
        assert names(tmp_path) == [here.name]
    assert names(tmp_path) == []


def test_that_of_a_run_that_lives_stays(tmp_path: Path) -> None:
    with temporary_directory(tmp_path) as one, temporary_directory(tmp_path) as other:
        assert names(tmp_path) == sorted([one.name, other.name])


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "qbridge-file").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").touch()
    (tmp_path / "qbridge-link").symlink_to(tmp_path / "target")
    before = names(tmp_path)
    with temporary_directory(tmp_path):
        pass
    assert names(tmp_path) == before
    assert names(tmp_path / "target") == ["precious"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_that_of_another_user_stays(tmp_path: Path) -> None:
    killed(tmp_path)
    os.chown(next(tmp_path.iterdir()), 12345, 12345)
    with temporary_directory(tmp_path):
        assert len(names(tmp_path)) == 2
