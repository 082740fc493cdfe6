"""Publish a finished output by rename.

Readers never see a partial directory.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from bridge.core.addresses import check_length
from bridge.core.errors import WriteError
from bridge.core.output.journal import lock, read_record
from bridge.core.output.names import JOURNAL, MANIFEST
from bridge.core.output.temporary import real_path, run_despite_signal

REPLACING = "pass overwrite=True (--overwrite)"  # how a caller replaces an output


def work_directory(out: Path) -> Path:
    """Return the hidden directory in which `out` is built, on the disk of the directory that a link names."""
    out = real_path(out)
    return out.parent / f".{out.name}.partial"


def reserved(out: Path) -> int:
    """Return the bytes on disk of an unfinished run of `out`."""
    work = work_directory(out)
    return sum(path.stat().st_blocks * 512 for path in work.glob("**/*") if path.is_file())


def check_free(out: Path, overwrite: bool, mark: str = MANIFEST, replacing: str = REPLACING) -> None:
    """Refuse an existing output before any work; only a directory with the file `mark` may be replaced.

    `replacing`: how the caller replaces it, for the message.
    """
    check_length(out)
    check_length(work_directory(out))
    if out.is_symlink() and not out.exists():
        raise WriteError(f"{out} is a symbolic link to nothing; remove it, or choose another directory")
    if out.exists() and not overwrite:
        raise WriteError(f"{out} exists already; choose another directory, or {replacing}")
    if out.exists() and overwrite and not (out / mark).exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise WriteError(
            f"{out} was not written by bridge (no {mark} in it): it is not overwritten; remove it yourself"
        )


def make_visible(work: Path, out: Path, overwrite: bool, mark: str) -> None:
    """Publish by one rename; with `overwrite` the old directory is renamed first and removed last.

    The journal is removed after the rename: a run killed between the two leaves a whole output and an unused file. A
    directory that appeared at `out` during the run stays, and so does the work, as the WriteError says. An interrupt
    leaves the old output or the new one.
    """
    aside, own = _aside(out), (work / JOURNAL).stat()
    try:
        check_free(out, overwrite, mark)
        if out.exists():
            shutil.rmtree(aside, ignore_errors=True)
            out.rename(aside)
        work.rename(out)
    except (WriteError, OSError) as error:
        _restore(out, mark)
        raise WriteError(f"{error}; the finished work is kept in {work}: rename it, or run again") from error
    except BaseException:
        run_despite_signal(lambda: _restore(out, mark))
        raise
    finally:
        with suppress(OSError):  # the output is whole; `recover` removes the rest later
            if os.path.samestat((out / JOURNAL).stat(), own):  # another run's directory may have one, too
                run_despite_signal(lambda: _tidy(out, mark))


def recover(out: Path, mark: str = MANIFEST) -> None:
    """Finish the renames of a killed run if the new output is there, undo them if only the old one was moved.

    Call it before an existing output is refused or read; a running process does this by itself.
    """
    out = real_path(out)
    work = work_directory(out)
    with suppress(OSError, ValueError, WriteError):  # a journal that is not text belongs to no run
        if (out / mark).exists():
            with (out / JOURNAL).open("r+") as journal:
                lock(journal, out)
                if "identity" in read_record(journal.readline(), out):
                    _tidy(out, mark)
        elif _aside(out).exists():
            with (work / JOURNAL).open("r+") as journal:
                lock(journal, work)
                _restore(out, mark)


def _tidy(out: Path, mark: str) -> None:
    """Remove the replaced output and then the journal, which the rename brought to `out`.

    The mark of the replaced output is removed first, so that a part of it is never put back.
    """
    if (out / JOURNAL).exists():
        aside = _aside(out)
        (aside / mark).unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        (out / JOURNAL).unlink()


def _restore(out: Path, mark: str) -> None:
    """Put back the old output if a run was killed between the two renames of an overwrite."""
    aside = _aside(out)
    if (aside / mark).exists() and not out.exists():  # without its mark it was being removed
        aside.rename(out)


def _aside(out: Path) -> Path:
    return out.parent / f".{out.name}.old"
