"""The journal of a work directory.

It has the identity, the finished parts, and the lock of the running process. It is not trusted after a reboot: it may
have reached the disk before the tensors.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from bridge.core.errors import WriteError
from bridge.core.output.names import JOURNAL


def lock(journal: IO[str], work: Path) -> None:
    """Lock the work directory; WriteError if another run has it, or finished it while this one opened it."""
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here = (work / JOURNAL).stat()
    except (BlockingIOError, FileNotFoundError) as error:
        raise busy(work) from error
    if here.st_ino != os.fstat(journal.fileno()).st_ino:
        raise busy(work)


def remove_unbegun(work: Path, parents: Iterable[Path] = ()) -> None:
    """Remove a work directory with an empty journal, and empty `parents`; one with content or an owner stays."""
    with suppress(OSError, ValueError, WriteError):
        if (work / JOURNAL).exists():
            with (work / JOURNAL).open("r+") as journal:
                lock(journal, work)
                if not journal.read(1):
                    (work / JOURNAL).unlink()
        work.rmdir()
    with suppress(OSError):
        for parent in parents:
            parent.rmdir()


def busy(work: Path) -> WriteError:
    return WriteError(f"{work} is being written by another run; wait for it, or choose another output")


def left(journal: IO[str], work: Path, identity: str | None) -> dict[str, Mapping[str, Any]] | None:
    """Return the finished parts of an unfinished run, None to start again; WriteError if the work is not this run's."""
    text = _text(journal, work)
    lines = text.split("\n")[:-1]
    others = [path.name for path in work.iterdir() if path.name != JOURNAL]
    if not lines and others:
        held = ", ".join(sorted(others)[:3])
        raise WriteError(f"{work} holds {held}, and no journal of bridge: another program wrote it; move it away first")
    if not lines or identity is None:
        return None
    records = [read_record(line, work) for line in lines]
    last = max((at for at, record in enumerate(records) if "identity" in record), default=0)
    begun = records[last]
    if begun.get("identity") != identity:
        raise WriteError(
            f"{work} is left from an unfinished run ({str(begun.get('identity', '?'))[:12]}, now {identity[:12]}): "
            "it is not mixed in, since the model, the scheme, the data, another argument or a package version differs. "
            "Remove it, or discard it with resume=False (--no-resume) of `convert` and `batch`"
        )
    if begun.get("boot") != _boot():
        return None
    journal.truncate(_whole(text))
    done = records[last + 1 :]
    if not all(isinstance(record.get("done"), str) for record in done):
        raise _damaged(work, "a line without `done`")
    return {record["done"]: record.get("told", {}) for record in done}


def valid_lines(journal: IO[str], work: Path) -> list[str]:
    """The lines in the file from the last identity on; none if the work must not be continued."""
    with suppress(OSError):  # a full disk: what is not in the file does not count
        journal.flush()
    text = (work / JOURNAL).read_text("utf-8", "replace")  # not `journal.seek`, which flushes
    lines = text.split("\n")[:-1]
    begun = max((at for at, line in enumerate(lines) if line.startswith('{"identity": ')), default=len(lines))
    return [] if '"boot": null' in "".join(lines[begun : begun + 1]) else lines[begun:]


def begin(journal: IO[str], work: Path, identity: str) -> None:
    """Start a journal in an empty directory."""
    void(journal, work, identity)
    for path in work.iterdir():
        if path.name != JOURNAL:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    journal.truncate(0)
    journal.write(json.dumps({"identity": identity, "boot": _boot()}) + "\n")
    journal.flush()


def void(journal: IO[str], work: Path, identity: str) -> None:
    """Record that the work must not be continued: a kill while files are removed must not leave a journal of them.

    This is a further line: with files in the directory a journal is never empty, or they would belong to no run.
    """
    journal.truncate(_whole(_text(journal, work)))
    journal.write(json.dumps({"identity": identity, "boot": None}) + "\n")
    journal.flush()


def _text(journal: IO[str], work: Path) -> str:
    journal.seek(0)
    try:
        return journal.read()
    except UnicodeDecodeError as error:
        raise _damaged(work, error) from error


def _damaged(work: Path, why: object) -> WriteError:
    return WriteError(f"{work / JOURNAL} is damaged ({why}); remove {work}")


def _whole(text: str) -> int:
    """Return the length of the complete lines: a torn last line was not acknowledged."""
    return text.rfind("\n") + 1


def read_record(line: str, work: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _damaged(work, error) from error
    return record if isinstance(record, dict) else {}


def check_joined(directory: Path, identity: str) -> None:
    """Refuse to write into a work directory that is absent or no longer that of the run `identity`.

    The run itself has the lock. A process that writes for it calls this before every part: the run may have given the
    process up, and another run may have begun in the same directory.
    """
    try:
        with (directory / JOURNAL).open() as journal:
            line = journal.readline()
    except OSError as error:
        raise WriteError(
            f"{directory}: cannot be opened on {socket.gethostname()} ({error.strerror}): the run has ended, or `out` "
            "does not lie on a file system that all nodes share under one path"
        ) from error
    if read_record(line, directory).get("identity") != identity:
        raise WriteError(f"another run has taken over {directory}; this run stops")


def _boot() -> str:
    """Return an id that changes with each boot; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
