"""The marker file of an unfinished upload.

It says whose the output is and what arrived; each run compares it with the listing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from bridge.core.parsing.limited import parse_json
from bridge.core.parsing.typed_json import typed

NOTE = "qbridge-upload.json"


@dataclass(frozen=True)
class Sent:
    """One file that arrived: the checksum of what was sent, and the size and tag that the store gave it."""

    sha256: str
    size: int
    tag: str


@dataclass(frozen=True)
class Note:
    """`run` is random, and known to the run alone; `sender` is for people: its machine and directory."""

    run: str
    sender: str
    sent: dict[str, Sent] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def parse_note(text: bytes) -> Note:
    """The note; a damaged one counts as another run's, with no files sent."""
    try:
        return typed(Note, parse_json(text))
    except (ValueError, KeyError, TypeError):
        return Note("", "another run")
