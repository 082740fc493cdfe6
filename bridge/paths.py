"""Refuses what is too long to be a path, before it is asked for; must never say whether anything is there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from bridge.errors import UsageError
from bridge.remote.address import is_remote

SHOWN = 60  # characters of what is refused


def check_length(place: object) -> None:
    """UsageError where `place`, what somebody called a path, is longer than the system takes for one."""
    if not isinstance(place, str | Path) or is_remote(place):
        return
    try:
        os.lstat(place)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            text = str(place)
            raise UsageError(
                f"{text[:SHOWN]}...: {len(text):,} characters are too long for a path here, or for a name in one; most "
                "systems take 4,095 bytes and 255. Give a shorter one"
            ) from error
    except ValueError:  # a zero byte, half a character: no path either, and told as what is not there
        return
