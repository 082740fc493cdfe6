"""The journal of a work directory: whose work it is, what is done, and a lock that only a run that lives holds.

It must never be believed after another start of the machine: it may have reached the disk when the tensors had not.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from bridge.errors import WriteError

JOURNAL = "journal.jsonl"


def lock(journal: IO[str], work: Path) -> None:
    """Own the work directory; WriteError where another run does, or finished it while this one opened it."""
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here = (work / JOURNAL).stat()
    except OSError as error:
        raise busy(work) from error
    if here.st_ino != os.fstat(journal.fileno()).st_ino:
        raise busy(work)


def remove_unbegun(work: Path) -> None:
    """Remove a work directory whose journal says nothing; one that holds anything, or that a run owns, stays."""
    with suppress(OSError, ValueError, WriteError):
        if (work / JOURNAL).exists():
            with (work / JOURNAL).open("r+") as journal:
                lock(journal, work)
                if not journal.read(1):
                    (work / JOURNAL).unlink()
        work.rmdir()


def busy(work: Path) -> WriteError:
    return WriteError(f"{work} is being written by another run; wait for it, or choose another output")


def left(journal: IO[str], work: Path, identity: str | None) -> dict[str, Mapping[str, Any]] | None:
    """What the journal of a killed run has, None where work begins anew; WriteError where it is not ours to take up.

    After a start of the machine nothing is trusted: the journal may have reached the disk when the tensors had not.
    """
    text = _text(journal, work)
    lines = text.split("\n")[:-1]
    strangers = [path.name for path in work.iterdir() if path.name != JOURNAL]
    if not lines and strangers:
        raise WriteError(
            f"{work} holds {', '.join(sorted(strangers)[:3])} and no journal: not ours; move it away first"
        )
    if not lines or identity is None:
        return None
    records = [read_record(line, work) for line in lines]
    last = max((at for at, record in enumerate(records) if "identity" in record), default=0)
    begun = records[last]
    if begun.get("identity") != identity:
        raise WriteError(
            f"{work} is left from a killed run ({str(begun.get('identity', '?'))[:12]}, now {identity[:12]}): "
            "it is not mixed in. Remove it, or pass resume=False (--no-resume) to discard it"
        )
    if begun.get("boot") != _boot():
        return None
    journal.truncate(_whole(text))
    done = records[last + 1 :]
    if not all(isinstance(record.get("done"), str) for record in done):
        raise _damaged(work, "a line says nothing")
    return {record["done"]: record.get("told", {}) for record in done}


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
    """Say that nothing here is to be gone on from: a kill while files are removed must not leave a journal of them.

    It is said in a further line: beside files a journal is never empty, or they would be nobody's.
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
    """How much of a journal was acknowledged: a torn last line was not."""
    return text.rfind("\n") + 1


def read_record(line: str, work: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _damaged(work, error) from error
    return record if isinstance(record, dict) else {}


def check_joined(directory: Path, identity: str) -> None:
    """Refuse to write into a work directory that is not there, or not any more that of the run `identity`.

    The run itself holds the lock. Whoever writes for it asks before every piece: it may have been cut off from the run,
    which gave it up, and another may have begun in the same place.
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
        raise WriteError(f"{directory} is another run's now; this one was given up")


def _boot() -> str:
    """What is another one after each start of the machine; "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
