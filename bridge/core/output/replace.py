"""What is seen at `out`: the old output or the new one, never half of either, whenever a run is killed."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from bridge.errors import WriteError
from bridge.journal import JOURNAL, lock, read_record
from bridge.paths import check_length
from bridge.scratch import surely

MARK = "bridge.json"  # in every model that bridge wrote
REPLACING = "pass overwrite=True (--overwrite)"  # how a caller has an output replaced


def work_directory(out: Path) -> Path:
    """Where `out` is made until it is whole."""
    return out.parent / f".{out.name}.partial"


def reserved(out: Path) -> int:
    """Bytes on disk that a killed run of `out` holds already."""
    work = work_directory(out.absolute())
    return sum(path.stat().st_blocks * 512 for path in work.glob("**/*") if path.is_file())


def check_free(out: Path, overwrite: bool, mark: str = MARK, replacing: str = REPLACING) -> None:
    """Refuse an output that exists, before any work; only what holds the file `mark` is ours to replace.

    `replacing`: what the caller does to have it replaced, for the message.
    """
    check_length(out)
    check_length(work_directory(out.absolute()))
    if out.is_symlink() and not out.exists():
        raise WriteError(f"{out} is a symbolic link to nothing; remove it, or choose another directory")
    if out.exists() and not overwrite:
        raise WriteError(f"{out} exists already; choose another directory, or {replacing}")
    if out.exists() and overwrite and not (out / mark).exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise WriteError(
            f"{out} was not written by bridge (no {mark} in it): it is not overwritten; remove it yourself"
        )


def make_visible(work: Path, out: Path, overwrite: bool, mark: str) -> None:
    """One rename; with `overwrite` the old directory steps aside first and is removed last.

    The journal goes after the rename: a run killed between the two leaves a whole output and a file that nobody reads.
    What appeared at `out` during the run is somebody's: it stays, and so does the work, as the WriteError says. An
    interrupt leaves the old output there, or the new one.
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
        surely(lambda: _restore(out, mark))
        raise
    finally:
        with suppress(OSError):  # the output is whole; what cannot be removed now is settled later
            if os.path.samestat((out / JOURNAL).stat(), own):  # another's directory may have one, too
                surely(lambda: _tidy(out, mark))


def settle(out: Path, mark: str = MARK) -> None:
    """Finish the renames of a killed run where the new output is there, undo them where only the old one was moved.

    Call it before an output that exists is refused or read; a run that lives does this by itself.
    """
    out, work = out.absolute(), work_directory(out.absolute())
    with suppress(OSError, ValueError, WriteError):  # a journal that is no text is nobody's
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
    """After the rename, which brought a journal to `out`: remove what it replaced, then the journal.

    The mark of what it replaced goes first, so that half of it is never put back.
    """
    if (out / JOURNAL).exists():
        aside = _aside(out)
        (aside / mark).unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        (out / JOURNAL).unlink()


def _restore(out: Path, mark: str) -> None:
    """Put back the old output where a run was killed between the two renames of an overwrite."""
    aside = _aside(out)
    if (aside / mark).exists() and not out.exists():  # what has lost its mark was being removed
        aside.rename(out)


def _aside(out: Path) -> Path:
    return out.parent / f".{out.name}.old"
