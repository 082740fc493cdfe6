"""A finished output in a hidden directory here, before it is sent."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.addresses import is_remote, shown
from bridge.core.output.names import JOURNAL
from bridge.core.parsing.limited import parse_json
from bridge.core.remote.upload_directory import Holding

IDENTITY = ".qbridge-identity"  # a file in a finished output with the id of its run
MAX_VALUES = 64 << 20  # values of a report: some tens for a tensor


def staging_path(out: str | Path) -> Path:
    """Return where an output is written: at `out`, or, before an upload, in a hidden directory of the current one."""
    if not is_remote(out):
        return Path(out)
    where = shown(str(out))
    name = f".{where.rpartition('/')[2]}-{hashlib.sha256(where.encode()).hexdigest()[:8]}.sending"
    return Path(name).absolute() / "made"


class Staged:
    """The output of one conversion: it is made in `local`, inside the hidden directory that `holding` owns."""

    def __init__(self, where: str, holding: Holding) -> None:
        self.where, self._holding = where, holding
        self.local = staging_path(where)
        self._run = ""  # the run that made the finished output

    def reserve(self, card: Path | bytes | None) -> None:
        """Take the place before the work, if a listing does not tell whether that can be done.

        `card`: the source's model card, a file or its content.
        """

    def kept(self, identity: str, verified: bool) -> Mapping[str, Any] | None:
        """The report, as JSON data, of an output that is finished and not sent; None if this run has none."""
        self._run = _of_run(identity, verified)
        if not self.is_staged():
            return None
        try:
            return dict(parse_json((self.local / "report.json").read_bytes(), MAX_VALUES))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note_finished(self, directory: Path, identity: str, verified: bool) -> None:
        """Say in a finished output of which run it is, and whether it was compared with its source."""
        self._run = _of_run(identity, verified)
        (directory / IDENTITY).write_text(self._run)

    def is_staged(self) -> bool:
        """Whether the output of this run is finished here, so that only the upload is left."""
        try:
            return (self.local / IDENTITY).read_text() == self._run
        except (OSError, ValueError):
            return False

    def tidy_up(self) -> None:
        """Remove what was made here once all is there and the note is gone, whichever run has sent the last of it."""
        if self.local.exists():
            shutil.rmtree(self.local)
        self._holding.forget()

    def files(self) -> dict[str, Path]:
        """The files to send: all but those that only this machine needs."""
        found = {path.relative_to(self.local).as_posix(): path for path in sorted(self.local.rglob("*"))}
        return {name: path for name, path in found.items() if path.is_file() and name not in (IDENTITY, JOURNAL)}


def _of_run(identity: str, verified: bool) -> str:
    return f"{identity} {'verified' if verified else 'not verified'}"
