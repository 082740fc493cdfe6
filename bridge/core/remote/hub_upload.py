"""Upload an output to a repository of the hub in one commit.

The repository is made before the work, private. Large files are sent ahead of the commit, and those that the hub has
already are not sent again; until the commit nothing of them is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.core.errors import UsageError, WriteError, first_line, warn
from bridge.core.output.names import CARD, MANIFEST
from bridge.core.output.replace import REPLACING, check_free
from bridge.core.progress import Progress
from bridge.core.remote.objects import unsigned
from bridge.core.remote.staged import IDENTITY, Staged
from bridge.core.remote.upload_directory import Holding
from bridge.core.text import first_of
from bridge.core.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

ATTRIBUTES = ".gitattributes"  # the hub's own file, in every new repository
IGNORED = ".gitignore"  # by which the hub leaves files out of a commit
OTHER_KINDS = ("buckets", "datasets", "kernels", "spaces")  # hf://datasets/name is not below an organization
LARGE = 1 << 20  # bytes from which a file is sent ahead of the commit; the hub wants smaller ones in it
SMALL = 10 << 20  # bytes below which a file may lie among the commits themselves, under its SHA-1
LOGIN = "`hf auth login`, or set HF_TOKEN, with a token that may write: https://huggingface.co/settings/tokens"


class Repository(NamedTuple):
    """What lies in a repository: its last commit, and how each file is hashed there, with its digest."""

    head: str
    files: Mapping[str, tuple[str, str]]

    @property
    def own(self) -> set[str]:
        """The files that somebody put there."""
        return {*self.files} - {ATTRIBUTES}


def repository_of(where: str) -> str:
    """The repository of an output, `org/name`; UsageError if the address is not that of a whole one."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    repository = where.partition("://")[2]
    if "@" in repository:
        raise UsageError(f"out={where}: an output is the next commit of the main branch; leave out what follows @")
    if repository.count("/") != 1 or repository.partition("/")[0] in OTHER_KINDS:
        raise UsageError(f"out={where}: give a whole model of the hub: hf://org/name")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"out={where}: not a name of the hub ({first_line(error)}); give hf://org/name") from error
    return repository


class HubOutgoing(Staged):
    """An output that becomes one commit of a repository."""

    def __init__(self, where: str, holding: Holding) -> None:
        from huggingface_hub import HfApi

        super().__init__(where, holding)
        self._repository, self._api = repository_of(where), HfApi()
        self._head = ""  # the commit that is replaced; "" if there is no repository yet
        self._made = False  # whether this run made the repository

    def begin(self, overwrite: bool) -> None:
        """Refuse a repository that cannot be written to, before any work."""
        self.tidy()
        self.existing(overwrite)

    def existing(self, overwrite: bool, replacing: str = REPLACING) -> None:
        """WriteError if what lies there is in the way, or nothing may be written there; changes nothing."""
        there = self._listing()
        check_free(self.local, overwrite=True)
        lies = first_of(sorted(there.own), 4) if there else ""
        if lies and not overwrite:
            raise WriteError(f"{self.where} exists already, with {lies}; choose another name, or {replacing}")
        if there and lies and MANIFEST not in there.own:
            raise WriteError(
                f"{self.where} has {lies}, and was not written by bridge (no {MANIFEST}): it is not overwritten; "
                "choose another name, or remove its files yourself"
            )
        if there and IGNORED in there.files:
            raise WriteError(f"{self.where} has a {IGNORED}, by which the hub leaves files out; remove it there")
        self._check_rights(there is not None)
        self._head = there.head if there else ""

    def reserve(self, card: Path | bytes | None) -> None:
        """Make the repository, and let the hub read the metadata of the source's model card: it may refuse either."""
        content = card if isinstance(card, bytes) or card is None else card.read_bytes()
        if content and content.startswith(b"---"):
            self._check_card(content.decode("utf-8", "replace"))
        if not self._head:
            with self._asking():
                self._api.create_repo(self._repository, private=True)
            self._made = True
            there = self._listing()
            if there is None or there.own:
                raise self._changed()
            self._head = there.head

    def _check_card(self, card: str) -> None:
        from huggingface_hub import ModelCard
        from yaml import YAMLError

        with self._asking():
            try:
                ModelCard(card, ignore_metadata_errors=True).validate()
                return
            except (ValueError, YAMLError) as error:
                why = " ".join(str(error).split())[:300]
        raise WriteError(
            f"{self.where}: the hub does not take the metadata of the source's {CARD} ({why}); mend the lines at its "
            "top, between ---"
        )

    def tidy(self) -> None:
        """Remove what an earlier run made here, if the output is whole there."""
        there = self._listing() if (self.local / IDENTITY).is_file() else None
        if there and MANIFEST in there.own and not self._missing(self._additions()):
            self.tidy_up()

    def send(self, progress: Progress) -> None:
        """Send the files that the hub has not, then make the commit that shows them and removes all others."""
        from huggingface_hub import CommitOperationDelete

        there, additions = self._listing(), self._additions()
        if there is None or there.head != self._head:
            raise self._changed()
        gone = [CommitOperationDelete(name, is_folder=False) for name in sorted(there.own - {*additions})]
        new = [one for one in additions.values() if not _same(one, there)]
        total = sum(one.upload_info.size for one in additions.values())
        done = total - sum(one.upload_info.size for one in new)
        with _no_bars():
            for one in sorted(new, key=lambda one: -one.upload_info.size):
                if one.upload_info.size >= LARGE:
                    with self._asking():
                        self._api.preupload_lfs_files(self._repository, [one], free_memory=False)
                progress(done := done + one.upload_info.size, total, "send")
            operations: list[Any] = [*new, *gone]
            if operations:
                self._commit(operations, additions)
        if wrong := self._missing(additions):
            raise WriteError(f"{self.where}: {first_of(wrong, 4)} did not arrive as they are in {self.local}")

    def rest(self) -> str:
        """Where the finished output is, and what is seen of it at the hub."""
        return (
            f"nothing of it is seen at {self.where} before all is there; the finished output is kept in {self.local}. "
            "Run again to send the rest"
        )

    def give_up(self) -> None:
        """Name the empty repository that this run made; nothing there is deleted."""
        if self._made:
            warn(f"{self.where} was made, private and empty; the next run writes into it, or delete it at the hub")

    def _listing(self) -> Repository | None:
        """What lies there; None if there is no such repository, or this user does not see it."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with self._asking():
            try:
                info = self._api.model_info(self._repository, files_metadata=True)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None
        if info.id != self._repository:  # the hub sends on to the new name of what was renamed
            raise WriteError(f"{self.where} is called hf://{info.id} at the hub; give that")
        files = {}
        for file in info.siblings or ():
            digest = ("sha256", file.lfs.sha256) if file.lfs else ("sha1", file.blob_id or "")
            files[str(file.rfilename)] = digest
        return Repository(str(info.sha), files)

    def _check_rights(self, there: bool) -> None:
        """WriteError if this user may not write there, as far as the hub says so without a change."""
        from huggingface_hub import get_token

        if get_token() is None:
            raise WriteError(f"{self.where}: no token of the hub is here; {LOGIN}")
        with self._asking():
            user = self._api.whoami()
            token = user.get("auth", {}).get("accessToken") or {}
            orgs = [org["name"] for org in user.get("orgs", ()) if org.get("roleInOrg") != "read"]
            owners = [str(user["name"]), *map(str, orgs)]
        if token.get("role") == "read":
            raise WriteError(f"{self.where}: the token of {owners[0]} may only read; {LOGIN}")
        if there:
            with self._asking():
                self._api.auth_check(self._repository, write=True)
            return
        owner = self._repository.partition("/")[0]
        if owner.lower() not in map(str.lower, owners) and token.get("role") != "fineGrained":  # that names no owners
            raise WriteError(
                f"{self.where}: {owners[0]} may not write to {owner}; may write to {first_of(owners, 8)}: choose one "
                f"of them, or {LOGIN}"
            )

    def _additions(self) -> dict[str, CommitOperationAdd]:
        from huggingface_hub import CommitOperationAdd

        return {name: CommitOperationAdd(name, path) for name, path in self.files().items()}

    def _commit(self, operations: list[Any], additions: Mapping[str, CommitOperationAdd]) -> None:
        message = f"Write the output of qbridge {__version__}"
        try:
            with self._asking():
                self._api.create_commit(self._repository, operations, commit_message=message, parent_commit=self._head)
        except WriteError:
            if self._missing(additions):  # else the commit is there, and only its answer was lost
                raise

    def _missing(self, additions: Mapping[str, CommitOperationAdd]) -> list[str]:
        """The files that are not there as they are here."""
        there = self._listing()
        return [name for name, one in additions.items() if not (there and _same(one, there))]

    def _changed(self) -> WriteError:
        return WriteError(f"{self.where} was changed by others meanwhile; nothing was sent. See what is there")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Raise what the hub or its library says as a WriteError: one sentence with its remedy."""
        try:
            yield
        except Exception as error:  # any of the hub's library
            status = getattr(getattr(error, "response", None), "status_code", 0)
            said = getattr(error, "server_message", None)
            said = first_line(Exception(said)) if said else unsigned(error)
            where = self.where
            text = {
                401: f"{where}: the hub does not know this user ({said}); {LOGIN}",
                403: f"{where}: this user may not write there ({said}); choose another name, or {LOGIN}",
                404: f"{where}: the hub has no such repository any more ({said}); run again",
                409: f"{where}: the hub refuses ({said}); see what is there, or choose another name",
                429: f"{where}: the hub is busy ({said}); run again in some minutes",
                503: f"{where}: the hub is busy ({said}); run again in some minutes",
                412: f"{where} was changed by others meanwhile ({said}); see what is there",
            }.get(
                int(status or 0),
                f"{where}: the hub cannot be asked ({said}); check the network, HF_ENDPOINT and HF_HUB_OFFLINE, and "
                "run again",
            )
            raise WriteError(text) from error


def _same(one: CommitOperationAdd, there: Repository) -> bool:
    """Whether a file is there as it is here."""
    kind, digest = there.files.get(one.path_in_repo, ("", ""))
    if kind == "sha256":
        return one.upload_info.sha256.hex() == digest
    if kind == "sha1" and one.upload_info.size < SMALL:
        data = Path(str(one.path_or_fileobj)).read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == digest
    return False


@contextmanager
def _no_bars() -> Iterator[None]:
    """The hub's library shows no bars of its own beside the caller's."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
