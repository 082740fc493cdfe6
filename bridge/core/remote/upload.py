"""Upload an output to s3://, gs://, az:// or a store of fsspec.

It is made locally first; a partial upload never loads.

Object stores have no rename: weights go first, what makes them a model last, and a note lies beside them meanwhile. It
lists what was sent, so that an interrupted upload resumes, and an output without a note is whole.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from bridge.core.addresses import WEB, checked, is_remote, scheme_of, shown, store_of
from bridge.core.errors import BridgeError, UsageError, WriteError
from bridge.core.output.names import MANIFEST
from bridge.core.output.replace import REPLACING, check_free
from bridge.core.progress import Progress
from bridge.core.remote.hub_upload import HubOutgoing, repository_of
from bridge.core.remote.objects import BUCKETS, Folder, folder, reporting
from bridge.core.remote.staged import Staged, staging_path
from bridge.core.remote.store import RemoteStat
from bridge.core.remote.upload_directory import Holding, owning, read_holding
from bridge.core.remote.upload_note import NOTE, Note, Sent, parse_note

# Without these nothing takes the files for a model, wherever they lie in it: sent last, in this order, removed first.
LAST = (
    "model.safetensors.index.json", ".metadata", "metadata.json", "common.pt", "model.engine", "model.onnx",
    "config.json", MANIFEST,
)  # fmt: skip
MAX_NOTE = 4 << 20  # bytes of an upload's note


@contextmanager
def sending(url: str, overwrite: bool, progress: Progress) -> Iterator[Outgoing | HubOutgoing]:
    """Convert into `local` while the block runs; then it is sent. No other run has `local` until that has ended."""
    with owning(staging_path(url).parent, check_out(url)) as holding:
        outgoing = _outgoing(url, holding)
        try:
            outgoing.begin(overwrite)
            yield outgoing
            outgoing.send(progress)
        except BaseException as error:
            if not outgoing.is_staged():
                outgoing.give_up()
                raise
            if isinstance(error, BridgeError):
                raise WriteError(f"{error}\n  {outgoing.rest()}") from error
            error.add_note(outgoing.rest())  # an interrupt, which its reader tells
            raise
        outgoing.tidy_up()


def check_out(url: str) -> str:
    """The address of an output as messages call it; UsageError if no output can be sent there."""
    where, scheme = shown(url), scheme_of(url)
    if scheme in WEB:
        raise UsageError(
            f"out={where}: a web server takes no files; write to a directory, hf://, s3://, gs:// or az://"
        )
    if scheme == "hf":
        repository_of(where)
        return where
    folder(checked(url))
    parts = where.partition("://")[2].strip("/").split("/")
    if {"", ".", ".."} & {*parts} or (store_of(url) in BUCKETS and len(parts) < 2):
        raise UsageError(f"out={where}: give a directory in it: {scheme}://{parts[0] or 'place'}/name")
    return where


def check_output(out: str | Path, overwrite: bool, replacing: str = REPLACING) -> None:
    """Refuse an output that `convert` would refuse because of what lies there; writes nothing.

    `replacing`: see `bridge.core.output.replace.check_free`.
    """
    if is_remote(out):
        _outgoing(str(out), read_holding(staging_path(out).parent)).existing(overwrite, replacing)
    else:
        check_free(Path(out), overwrite, replacing=replacing)


def tidy(url: str) -> None:
    """Remove what a killed run left here of an output that is whole there, unless another run owns it."""
    directory = staging_path(url).parent
    if directory.is_dir():
        with suppress(WriteError, OSError), owning(directory, check_out(url)) as holding:
            _outgoing(url, holding).tidy()


def _outgoing(url: str, holding: Holding) -> Outgoing | HubOutgoing:
    where = check_out(url)
    return HubOutgoing(where, holding) if scheme_of(url) == "hf" else Outgoing(where, folder(checked(url)), holding)


class Outgoing(Staged):
    """An output that is sent to an object store."""

    def __init__(self, where: str, store: Folder, holding: Holding) -> None:
        super().__init__(where, holding)
        self._folder = store
        self._sender = f"{socket.gethostname()}:{self.local}"
        self._sent: dict[str, Sent] = {}
        self._stale: list[str] = []
        self._note_stays = True  # until `begin` knows whether this run may remove it

    def begin(self, overwrite: bool) -> None:
        """Refuse an address that cannot be written to, before any work, by writing the note there."""
        self.tidy()
        found, note = self.existing(overwrite)
        self._sent = dict(note.sent) if note else {}
        self._stale = sorted({*found} - {NOTE})
        ours = note is not None and note.run == self._holding.run
        try:
            self._holding.remember()
            self._leave_note()
        except WriteError as error:
            if not ours:
                self._holding.forget()
            if isinstance(error.__cause__, FileNotFoundError) and store_of(self.where) in BUCKETS:
                bucket = self.where.partition("://")[2].partition("/")[0]
                raise WriteError(f"{self.where}: no bucket is called {bucket}; make it, or check its name") from error
            raise
        except BaseException as error:  # an interrupt: the store may yet do what it was asked
            error.add_note(
                f"a note, {NOTE}, may be at {self.where}; {self._holding.directory} is kept, by which the next run "
                "here knows it. Run again, or remove both"
            )
            raise
        # An output that lost its manifest to an interrupted run can be replaced only as long as its note is there.
        self._note_stays = bool(self._sent) or (bool(self._stale) and MANIFEST not in self._stale)

    def existing(self, overwrite: bool, replacing: str = REPLACING) -> tuple[Mapping[str, RemoteStat], Note | None]:
        """What lies there, and its note; WriteError if that is in the way."""
        found, note = self._found()
        check_free(self.local, overwrite=True)
        untouched = MANIFEST in found and not (note and note.sent)
        if not found or (note and note.run == self._holding.run and not untouched):
            return found, note
        if note and note.run != self._holding.run and not overwrite:
            raise WriteError(
                f"{self.where} is being sent by {note.sender}, or that run was cut off; run it "
                f"there again, or {replacing} to take its place"
            )
        if not overwrite:
            raise WriteError(f"{self.where} exists already; choose another directory, or {replacing}")
        if note is None and MANIFEST not in found:
            raise WriteError(
                f"{self.where} was not written by bridge (no {MANIFEST} in it): it is not overwritten; "
                "remove it yourself"
            )
        return found, note

    def tidy(self) -> None:
        """Remove what an earlier run made here, if the output is whole there."""
        if self._holding.remembered:
            found, note = self._found()
            if not note and MANIFEST in found:
                self.tidy_up()

    def send(self, progress: Progress) -> None:
        """Send everything that is not there yet."""
        files = self.files()
        sizes = {name: path.stat().st_size for name, path in files.items()}
        done = 0
        self._check_ours()
        sums = {name: _checksum(path) for name, path in files.items()}
        self._check_ours()  # that took minutes
        self._unmake(sums)
        for name in sorted(files, key=lambda name: (_last(name), -sizes[name])):
            if _last(name) >= 0:  # old weights in one file would be read instead of new ones in many
                self._remove([old for old in self._stale if old not in files])
                self._stale = []
            if name not in self._sent:
                self._send(name, files[name], sums[name])
            progress(done := done + sizes[name], sum(sizes.values()), "send")
        self._compare(sizes)
        with suppress(Exception):  # any of a store's library: the output is whole
            self._folder.end_uploads()
        self._remove([NOTE])

    def rest(self) -> str:
        """How many files are sent, and where the others are."""
        return (
            f"{len(self._sent)} of {len(self.files())} files are at {self.where}, and nothing takes them for a model; "
            f"the finished one is kept in {self.local}. Run again to send the rest"
        )

    def give_up(self) -> None:
        """Take the note back if the conversion failed before anything was sent."""
        if self._note_stays:
            return
        with suppress(OSError, WriteError):  # the failure that led here is what matters
            if self._read_note().run == self._holding.run:
                self._folder.remove(NOTE)
            self._holding.forget()

    def _found(self) -> tuple[Mapping[str, RemoteStat], Note | None]:
        found = self._listing()
        return found, self._read_note() if NOTE in found else None

    def _unmake(self, sums: Mapping[str, str]) -> None:
        """Forget what is not there as it is here; while anything is missing, nothing there makes it a model."""
        found = self._listing()
        self._sent = {
            name: sent
            for name, sent in self._sent.items()
            if name in found and sent == Sent(sums.get(name, ""), found[name].nbytes, found[name].tag)
        }
        if self._sent.keys() != sums.keys():
            self._take_away(found)

    def _take_away(self, found: Collection[str]) -> None:
        """Remove what makes a model of the files there."""
        self._sent = {name: sent for name, sent in self._sent.items() if _last(name) < 0}
        self._leave_note()
        self._remove(sorted((name for name in found if _last(name) >= 0), key=_last, reverse=True))

    def _check_ours(self) -> None:
        """WriteError if another run took the place meanwhile: files of both would be mixed."""
        note = self._read_note()
        if note.run != self._holding.run:
            raise WriteError(f"{self.where}: {note.sender} took this run's place; nothing more was sent")

    def _send(self, name: str, path: Path, checksum: str) -> None:
        """A store has no lock: the note is read after each file, which is before the next."""
        with self._reporting("written", name):
            self._folder.put(name, path)
        with self._reporting("read", name):
            there = self._folder.stat(name)
        self._check_ours()
        self._sent[name] = Sent(checksum, there.nbytes, there.tag)
        self._leave_note()

    def _compare(self, sizes: Mapping[str, int]) -> None:
        """WriteError if what is there is not what was sent, or another run took the place."""
        found = self._listing()
        self._check_ours()
        arrived = {name: (look.nbytes, look.tag) for name, look in found.items()}
        if wrong := [name for name, size in sizes.items() if arrived.get(name) != (size, self._sent[name].tag)]:
            self._sent = {name: sent for name, sent in self._sent.items() if name not in wrong}
            self._take_away(found)
            raise WriteError(f"{self.where}: {', '.join(wrong[:4])} did not arrive whole")

    def _listing(self) -> Mapping[str, RemoteStat]:
        with self._reporting("listed"), suppress(FileNotFoundError):
            return self._folder.list()
        return {}

    def _read_note(self) -> Note:
        with self._reporting("read", NOTE):
            nbytes = min(self._folder.stat(NOTE).nbytes, MAX_NOTE)
            return parse_note(bytes(self._folder.read(NOTE, 0, nbytes)[1]) if nbytes else b"")

    def _leave_note(self) -> None:
        with self._reporting("written", NOTE):
            self._folder.put(NOTE, Note(self._holding.run, self._sender, self._sent).to_bytes())

    def _remove(self, names: Collection[str]) -> None:
        for name in names:
            with self._reporting("removed", name), suppress(FileNotFoundError):
                self._folder.remove(name)

    def _reporting(self, doing: str, name: str = "") -> AbstractContextManager[None]:
        return reporting(f"{self.where}/{name}".rstrip("/"), doing, WriteError)


def _last(name: str) -> int:
    """Position among the files that are sent last; -1 for all others."""
    own = name.rpartition("/")[2]
    return LAST.index(own) if own in LAST else -1


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
