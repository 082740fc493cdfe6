"""Notes beside outputs that are being sent (`qbridge-upload.json`), met by a run that begins there, against `json`.

Correct is: the run goes on where the note is whole and names it, and then its own note tells the same files as sent;
everything else is somebody's, and refused before anything is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.remote.store import RemoteStat
from bridge.core.remote.upload import Outgoing
from bridge.core.remote.upload_directory import Holding
from bridge.core.remote.upload_note import NOTE, Note, Sent
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import VALUES, WORDS, jsons, one_file

RUN = "0123456789abcdef" * 2
WHOLE = Note(RUN, "here:/made", {f"{at}.safetensors": Sent("0" * 64, at * 10**6, f'"{at}"') for at in range(3)})


@dataclass
class _Holding:
    """As much of `Holding` as a run that begins uses."""

    directory: Path
    run: str = RUN
    remembered: bool = False

    def remember(self) -> None:
        """It is known."""

    def forget(self) -> None:
        """It stays known."""


@dataclass
class _Store:
    """A folder of a store, its files in memory."""

    files: dict[str, bytes]
    written: list[str] = field(default_factory=list)

    def list(self) -> dict[str, RemoteStat]:
        return {name: self.stat(name) for name in self.files}

    def stat(self, name: str) -> RemoteStat:
        return RemoteStat(len(self.files[name]), "x")

    def read(self, name: str, begin: int, end: int) -> tuple[RemoteStat, bytes]:
        return self.stat(name), self.files[name][begin:end]

    def put(self, name: str, content: bytes | Path) -> None:
        assert isinstance(content, bytes)
        self.written.append(name)
        self.files[name] = content

    def remove(self, name: str) -> None:
        del self.files[name]

    def end_uploads(self) -> None:
        """There are none."""


def make(root: Path) -> None:
    (root / NOTE).write_bytes(WHOLE.to_bytes())


@st.composite
def _whole(draw: st.DrawFn) -> bytes:
    """A note in which every value is of its type, and of any kind otherwise."""
    texts = st.one_of(st.sampled_from(WORDS), st.text(max_size=8)).map(lambda text: text.replace("\ud800", ""))
    sent = st.builds(Sent, texts, st.integers(-(1 << 70), 1 << 70), texts)
    run = draw(st.sampled_from((RUN, RUN, RUN.upper(), "")))
    return Note(run, draw(texts), draw(st.dictionaries(texts, sent, max_size=4))).to_bytes()


def cases(root: Path) -> SearchStrategy[Case]:
    changed = jsons(json.loads(WHOLE.to_bytes()), (*VALUES, RUN))
    return st.one_of(changed, changed, changed, _whole()).map(one_file(NOTE))


def read(root: Path) -> Note:
    """The note that the run leaves in the place of the one that it found."""
    store = _Store({NOTE: (root / NOTE).read_bytes(), "0.safetensors": b"a"})
    run = Outgoing(f"s3://bucket/{root.name}", store, cast(Holding, _Holding(root / "none")))
    try:
        run.begin(overwrite=False)
    except BaseException:
        assert not store.written, f"refused, and wrote {store.written}"
        raise
    said = json.loads(store.files[NOTE])
    return Note(said["run"], said["sender"], {name: Sent(**sent) for name, sent in said["sent"].items()})


def agree(root: Path, found: Note) -> None:
    said = json.loads((root / NOTE).read_bytes())
    assert said["run"] == RUN == found.run
    assert type(said["sender"]) is str
    assert {name: Sent(**sent) for name, sent in said["sent"].items()} == found.sent
    assert all(type(sent.size) is int for sent in found.sent.values())


TARGET = Target("notes", make, cases, read, agree, NOTE)
