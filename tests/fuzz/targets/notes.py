"""Notes beside outputs that are being sent (`qbridge-upload.json`), met by a run that begins there, against `json`.

Correct is: the run goes on where the note is whole and names it, and then its own note tells the same files as sent;
everything else is somebody's, and refused before anything is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.remote.holding import Holding
from bridge.remote.note import NOTE, Note, Sent
from bridge.remote.outgoing import Outgoing
from tests.attack.case import Case, Target
from tests.attack.mutate import VALUES, WORDS, jsons, one_file

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
    """As much of a file system of fsspec's, its files in memory."""

    files: dict[str, bytes]
    written: list[str] = field(default_factory=list)

    def invalidate_cache(self) -> None:
        """Nothing is kept."""

    def find(self, root: str, detail: bool) -> dict[str, dict[str, Any]]:
        return {name: {"size": len(data), "ETag": "x"} for name, data in self.files.items()}

    def cat_file(self, name: str) -> bytes:
        return self.files[name]

    def pipe_file(self, name: str, data: bytes) -> None:
        self.written.append(name)
        self.files[name] = data


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
    place = f"bucket/{root.name}"
    store = _Store({f"{place}/{NOTE}": (root / NOTE).read_bytes(), f"{place}/0.safetensors": b"a"})
    run = Outgoing(f"s3://{place}", store, place, cast(Holding, _Holding(root / "none")))
    try:
        run.begin(overwrite=False)
    except BaseException:
        assert not store.written, f"refused, and wrote {store.written}"
        raise
    said = json.loads(store.files[f"{place}/{NOTE}"])
    return Note(said["run"], said["sender"], {name: Sent(**sent) for name, sent in said["sent"].items()})


def agree(root: Path, found: Note) -> None:
    said = json.loads((root / NOTE).read_bytes())
    assert said["run"] == RUN == found.run
    assert type(said["sender"]) is str
    assert {name: Sent(**sent) for name, sent in said["sent"].items()} == found.sent
    assert all(type(sent.size) is int for sent in found.sent.values())


TARGET = Target("notes", make, cases, read, agree, NOTE)
