"""An output at s3://, gs:// or wherever fsspec writes: made here, then sent; nothing half-sent can be loaded.

Object stores know no rename: weights go first, what makes them a model last, and a note lies beside them meanwhile. It
says what was sent, so that a run that was cut off goes on, and that an output without it is whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, UsageError, WriteError
from bridge.journal import JOURNAL
from bridge.json_data import parse_json
from bridge.progress import Progress
from bridge.remote.address import checked, is_remote, scheme_of, shown, store_of
from bridge.remote.holding import Holding, held, seen
from bridge.remote.note import NOTE, Note, Sent, parse_note
from bridge.remote.objects import BUCKETS, S3, file_system, problem, tag_of
from bridge.report import Report, report_from_dict
from bridge.visible import MARK, REPLACING, check_free

IDENTITY = ".qbridge-identity"  # in a finished output that is to be sent: of which run it is
TRIES = 4
# Without these nothing takes the files for a model, wherever they lie in it: sent last, in this order, removed first.
LAST = (
    "model.safetensors.index.json", ".metadata", "metadata.json", "common.pt", "model.engine", "model.onnx",
    "config.json", MARK,
)  # fmt: skip
MOST_VALUES = 64 << 20  # of a report, some tens for a tensor
REFUSED = {
    "http": "a web server takes no files; write to a directory, s3:// or gs://",
    "https": "a web server takes no files; write to a directory, s3:// or gs://",
    "hf": "write to a directory, and `hf upload org/name DIRECTORY` makes one commit of it",
}


@contextmanager
def sending(url: str, overwrite: bool, progress: Progress) -> Iterator[Outgoing]:
    """Convert into `local` while the block runs; then it is sent. No other run has `local` until that has ended."""
    where, (fs, root) = shown(url), check_out(url)
    with held(made_at(url).parent, where) as holding:
        outgoing = Outgoing(where, fs, root, holding)
        try:
            outgoing.begin(overwrite)
            yield outgoing
            outgoing.send(progress)
        except BaseException as error:
            if not outgoing.is_made():
                outgoing.give_up()
                raise
            if isinstance(error, BridgeError):
                raise WriteError(f"{error}\n  {outgoing.rest()}") from error
            error.add_note(outgoing.rest())  # an interrupt, which its reader tells
            raise
        outgoing.tidy_up()


def check_out(url: str) -> tuple[Any, str]:
    """The file system of an address, and a directory's path in it; UsageError where no output can be sent."""
    where, scheme = shown(url), scheme_of(url)
    if scheme in REFUSED:
        raise UsageError(f"out={where}: {REFUSED[scheme]}")
    fs, root = file_system(checked(url))
    parts = root.strip("/").split("/")
    if {"", ".", ".."} & {*parts} or (store_of(url) in BUCKETS and len(parts) < 2):
        raise UsageError(f"out={where}: give a directory in it: {scheme}://{parts[0] or 'place'}/name")
    return fs, root


def made_at(out: str | Path) -> Path:
    """Where an output is made: there itself, or, before it is sent, in a hidden directory of the current one."""
    if not is_remote(out):
        return Path(out)
    where = shown(str(out))
    name = f".{where.rpartition('/')[2]}-{hashlib.sha256(where.encode()).hexdigest()[:8]}.sending"
    return Path(name).absolute() / "made"


def check_replaceable(url: str, overwrite: bool, replacing: str = REPLACING) -> None:
    """Refuse what `sending` would refuse to write to, by what lies there: one listing, and one note; writes nothing.

    `replacing`: see `bridge.visible.check_free`.
    """
    where, (fs, root) = shown(url), check_out(url)
    Outgoing(where, fs, root, seen(made_at(url).parent)).look(overwrite, replacing)


def tidy(url: str) -> None:
    """Remove what a killed run left here of an output that is whole there, unless another run has it now."""
    directory = made_at(url).parent
    if directory.is_dir():
        where, (fs, root) = shown(url), check_out(url)
        with suppress(WriteError, OSError), held(directory, where) as holding:
            Outgoing(where, fs, root, holding).tidy()


class Outgoing:
    """The output of one conversion: `local` is where it is made, inside the hidden directory that `holding` owns."""

    def __init__(self, where: str, fs: Any, root: str, holding: Holding) -> None:
        self.where, self._fs, self._root, self._holding = where, fs, root, holding
        self.local = made_at(where)
        self._sender = f"{socket.gethostname()}:{self.local}"
        self._sent: dict[str, Sent] = {}
        self._stale: list[str] = []
        self._note_stays = True  # until it is ours to take back
        self._run = ""  # of which the finished output is that is to be sent

    def begin(self, overwrite: bool) -> None:
        """Refuse what cannot be written to, before any work: the note that is left there shows that it can be."""
        self.tidy()
        found, note = self.look(overwrite)
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
                bucket = self._root.partition("/")[0]
                raise WriteError(f"{self.where}: no bucket is called {bucket}; make it, or check its name") from error
            raise
        except BaseException as error:  # an interrupt: what was asked of the store may yet be done
            error.add_note(
                f"a note, {NOTE}, may be at {self.where}; {self._holding.directory} is kept, by which the next run "
                "here knows it. Run again, or remove both"
            )
            raise
        # What lost its mark to a run that was cut off is nobody's without the note, and could not be replaced.
        self._note_stays = bool(self._sent) or (bool(self._stale) and MARK not in self._stale)

    def look(self, overwrite: bool, replacing: str = REPLACING) -> tuple[Mapping[str, Any], Note | None]:
        """What lies there, and its note; WriteError where that is in the way."""
        found, note = self._found()
        check_free(self.local, overwrite=True)
        self._check(found, note, overwrite, replacing)
        return found, note

    def tidy(self) -> None:
        """Remove what an earlier run made here, if the output is whole there."""
        if self._holding.remembered:
            found, note = self._found()
            if not note and MARK in found:
                self.tidy_up()

    def _found(self) -> tuple[Mapping[str, Any], Note | None]:
        found = self._listing()
        return found, self._read_note() if NOTE in found else None

    def _check(self, found: Mapping[str, Any], note: Note | None, overwrite: bool, replacing: str) -> None:
        """Refuse to write over what is there, unless it is ours and may be replaced, or to be gone on with."""
        untouched = MARK in found and not (note and note.sent)
        if not found or (note and note.run == self._holding.run and not untouched):
            return
        if note and note.run != self._holding.run and not overwrite:
            raise WriteError(
                f"{self.where} is being sent by {note.sender}, or that run was cut off; run it "
                f"there again, or {replacing} to take its place"
            )
        if not overwrite:
            raise WriteError(f"{self.where} exists already; choose another directory, or {replacing}")
        if note is None and MARK not in found:
            raise WriteError(
                f"{self.where} was not written by bridge (no {MARK} in it): it is not overwritten; remove it yourself"
            )

    def kept(self, identity: str, verified: bool) -> Report | None:
        """The report of a finished output that only was not sent to its end; None where there is none of this run."""
        self._run = _of_run(identity, verified)
        if not self.is_made():
            return None
        try:
            return report_from_dict(parse_json((self.local / "report.json").read_bytes(), MOST_VALUES))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note_finished(self, directory: Path, identity: str, verified: bool) -> None:
        """Say in a finished output of which run it is, and whether it was compared with its source."""
        self._run = _of_run(identity, verified)
        (directory / IDENTITY).write_text(self._run)

    def is_made(self) -> bool:
        """Whether the output of this run is finished here, so that only sending it is left."""
        try:
            return (self.local / IDENTITY).read_text() == self._run
        except (OSError, ValueError):
            return False

    def send(self, progress: Progress) -> None:
        """Send everything that is not there yet."""
        files = self._files()
        order = sorted(files, key=lambda name: (_last(name), -files[name].stat().st_size))
        total, done = sum(path.stat().st_size for path in files.values()), 0
        self._check_ours()
        sums = {name: _checksum(path) for name, path in files.items()}
        self._check_ours()  # that took minutes
        self._unmake(sums)
        for name in order:
            if _last(name) >= 0:
                self._clear(files)
            if name not in self._sent:
                self._send(name, files[name], sums[name])
            progress(done := done + files[name].stat().st_size, total, "send")
        self._compare(files)
        self._end_uploads()
        self._remove([NOTE])

    def rest(self) -> str:
        """What is sent, and where the finished output is, of which some was not."""
        return (
            f"{len(self._sent)} of {len(self._files())} files are at {self.where}, and nothing takes them for a model; "
            f"the finished one is kept in {self.local}. Run again to send the rest"
        )

    def _files(self) -> dict[str, Path]:
        """What is to be sent: all that is finished, but for what only runs on this machine read."""
        found = {path.relative_to(self.local).as_posix(): path for path in sorted(self.local.rglob("*"))}
        return {name: path for name, path in found.items() if path.is_file() and name not in (IDENTITY, JOURNAL)}

    def tidy_up(self) -> None:
        """Remove what was made here once all is there and the note is gone, whichever run has sent the last of it."""
        if self.local.exists():
            shutil.rmtree(self.local)
        self._holding.forget()

    def give_up(self) -> None:
        """Take the note back where the conversion failed before anything was sent."""
        if self._note_stays:
            return
        try:
            path = f"{self._root}/{NOTE}"
            if parse_note(self._fs.cat_file(path)).run == self._holding.run:
                self._fs.rm_file(path)
        except Exception:  # any of a store's library; the failure that led here is what matters
            return
        self._holding.forget()

    def _unmake(self, sums: Mapping[str, str]) -> None:
        """Forget what is not there as it is here; while anything is missing, nothing there makes it a model."""
        found = self._listing()
        whole = {
            name: sent
            for name, sent in self._sent.items()
            if name in found and sent == Sent(sums.get(name, ""), int(found[name]["size"]), tag_of(found[name]))
        }
        self._sent = whole
        if whole.keys() != sums.keys():
            self._take_away(found)

    def _take_away(self, found: Collection[str]) -> None:
        """Remove what makes it a model of the files there."""
        self._sent = {name: sent for name, sent in self._sent.items() if _last(name) < 0}
        self._leave_note()
        self._remove(sorted((name for name in found if _last(name) >= 0), key=_last, reverse=True))

    def _clear(self, files: Collection[str]) -> None:
        """Remove what is not of this output: old weights in one file would be read instead of new ones in many."""
        self._remove([name for name in self._stale if name not in files])
        self._stale = []

    def _end_uploads(self) -> None:
        """End uploads in parts that a kill has cut off: S3 keeps the parts, and bills them, until somebody does."""
        if store_of(self.where) != S3:
            return
        bucket, _, key = self._root.partition("/")
        with suppress(Exception):  # any of a store's library; who may not list them has a whole output all the same
            found = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/").get("Uploads", [])
            for upload in found:
                one = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._fs.call_s3("abort_multipart_upload", Bucket=bucket, **one)

    def _check_ours(self) -> None:
        """WriteError where another run took the place meanwhile: files of both would be mixed."""
        note = self._read_note()
        if note.run != self._holding.run:
            raise WriteError(f"{self.where}: {note.sender} took this run's place; nothing more was sent")

    def _send(self, name: str, path: Path, checksum: str) -> None:
        """A store has no lock: the note is asked after each file, which is before the next."""
        target = f"{self._root}/{name}"
        self._tried("written", name, lambda: self._fs.put_file(os.fspath(path), target))
        info = self._tried("read", name, lambda: self._fs.info(target))
        self._check_ours()
        self._sent[name] = Sent(checksum, int(info["size"]), tag_of(info))
        self._leave_note()

    def _compare(self, files: Mapping[str, Path]) -> None:
        """WriteError where what is there is not what was sent, or another run took the place."""
        found, wrong = self._listing(), []
        self._check_ours()
        for name, path in files.items():
            there, sent = found.get(name), self._sent[name]
            if not there or (there["size"], tag_of(there)) != (path.stat().st_size, sent.tag):
                wrong.append(name)
        if wrong:
            self._sent = {name: sent for name, sent in self._sent.items() if name not in wrong}
            self._take_away(found)
            raise WriteError(f"{self.where}: {', '.join(wrong[:4])} did not arrive whole")

    def _listing(self) -> dict[str, Any]:
        def listed() -> Any:
            self._fs.invalidate_cache()
            try:
                return self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}

        found = self._tried("listed", "", listed)
        root = self._root.strip("/")
        return {
            path.strip("/").removeprefix(f"{root}/"): info for path, info in found.items() if not path.endswith("/")
        }

    def _read_note(self) -> Note:
        return parse_note(self._tried("read", NOTE, lambda: self._fs.cat_file(f"{self._root}/{NOTE}")))

    def _leave_note(self) -> None:
        data = Note(self._holding.run, self._sender, self._sent).to_bytes()
        self._tried("written", NOTE, lambda: self._fs.pipe_file(f"{self._root}/{NOTE}", data))

    def _remove(self, names: Collection[str]) -> None:
        def removed(name: str) -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")

        for name in names:
            self._tried("removed", name, lambda name=name: removed(name))

    def _tried(self, doing: str, name: str, call: Any) -> Any:
        """Do it a few times; what a store's library says in the end becomes a WriteError."""
        for turn in range(TRIES):
            try:
                return call()
            except Exception as error:  # any of a store's library
                last = turn == TRIES - 1 or isinstance(error, PermissionError | FileNotFoundError)
                if last:
                    raise problem(f"{self.where}/{name}".rstrip("/"), doing, error, WriteError) from error
                time.sleep(0.25 * 2**turn)
        raise AssertionError("the last turn returns or raises")


def _last(name: str) -> int:
    """Where a file comes among those that are sent last; -1 for all others."""
    own = name.rpartition("/")[2]
    return LAST.index(own) if own in LAST else -1


def _of_run(identity: str, verified: bool) -> str:
    return f"{identity} {'verified' if verified else 'not verified'}"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
