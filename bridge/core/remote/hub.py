"""Models on the hub by hf://org/name@revision, read in ranges from the hub; puts nothing into its cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from bridge.errors import SourceError
from bridge.remote.address import Look, shown
from bridge.remote.client import Client, Flow
from bridge.remote.objects import said

PATIENCE = 2.0  # seconds that the others wait for who asks the hub where a file is stored
HINT = "request access to the model on the hub, and `hf auth login`"


class HubAddress:
    """One file of a commit. The hub sends on to where weights are stored, which answers for a while."""

    hint = HINT
    _sends_on = False

    def __init__(self, url: str, where: str, headers: Mapping[str, str]) -> None:
        self._url, self.where, self._headers = url, where, headers
        self._stored = ""
        self._asked = -PATIENCE  # when the hub was asked where it is stored, by somebody who was not told yet
        self._changed = threading.Condition()

    def request(self) -> tuple[str, Mapping[str, str]]:
        """Where it is stored, if that is known; of those who find that it ran out one asks the hub, the others wait."""
        with self._changed:
            if self._sends_on and not self._stored:
                self._changed.wait_for(lambda: self._stored, self._asked + PATIENCE - time.monotonic())
            if self._stored:
                return self._stored, {}
            self._asked = time.monotonic()
            return self._url, self._headers

    def moved(self, url: str) -> None:
        """Another server needs no token of the hub's; on the hub itself it may."""
        if urlsplit(url).netloc != urlsplit(self._url).netloc:
            with self._changed:
                self._stored, self._sends_on, self._asked = url, True, -PATIENCE
                self._changed.notify_all()

    def refused(self, url: str) -> bool:
        """An address of a store runs out; what the hub itself refuses stays refused."""
        with self._changed:
            if url == self._stored:
                self._stored = ""
        return urlsplit(url).netloc != urlsplit(self._url).netloc


class HubStore:
    """The files of one commit, which do not change: a branch that moves on while it is read does no harm."""

    def __init__(self, url: str, client: Client | None = None) -> None:
        from huggingface_hub import HfApi, HfFileSystem, get_token, hf_hub_url
        from huggingface_hub.hf_file_system import HfFileSystemResolvedRepositoryPath

        self.where = shown(url)
        self._client = client or Client()
        try:
            at = HfFileSystem().resolve_path(self.where)
            if not isinstance(at, HfFileSystemResolvedRepositoryPath) or at.repo_type != "model":
                raise SourceError(f"{self.where}: no model of the hub; give hf://org/name")
            hub = HfApi()
            info = hub.model_info(at.repo_id, revision=at.revision, files_metadata=True)
            if not isinstance(info.sha, str) or not info.sha:
                raise SourceError(f"{self.where}: the hub names no commit of it; check HF_ENDPOINT, and run again")
            looks = {str(file.rfilename): Look(file.size or 0, _tag(file, info.sha)) for file in info.siblings or ()}
        except SourceError:
            raise
        except Exception as error:  # any of the hub's library
            raise _problem(self.where, error) from error
        below = f"{at.path_in_repo}/" if at.path_in_repo else ""
        self.only = ""
        if at.path_in_repo and at.path_in_repo in looks:
            below, _, self.only = at.path_in_repo.rpartition("/")
            below = f"{below}/" if below else ""
            self.where = self.where.rpartition("/")[0]
            looks = {at.path_in_repo: looks[at.path_in_repo]}
        self.files: Mapping[str, Look] = {
            name.removeprefix(below): look for name, look in looks.items() if name.startswith(below)
        }
        if not self.files:
            raise SourceError(f"{self.where}: nothing is there; check the directory after org/name")
        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._addresses = {
            name: HubAddress(
                hf_hub_url(at.repo_id, f"{below}{name}", revision=info.sha, endpoint=hub.endpoint),
                f"{self.where}/{name}",
                headers,
            )
            for name in self.files
        }

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file."""
        self._client.fetch(self._addresses[name], begin, out, self._known(name))

    def flow(self, name: str, begin: int, end: int) -> Flow:
        """Bytes of a file, to be read in order."""
        return self._client.flow(self._addresses[name], begin, end, self._known(name))

    def give_up(self) -> None:
        """Fail what is being fetched."""
        self._client.give_up()

    def go_on(self) -> None:
        """Fetch again."""
        self._client.go_on()

    def _known(self, name: str) -> Look:
        """What a file must stay: that of a commit does, and where it is stored its ETag is another."""
        return self.files[name]._replace(tag="")


def _tag(file: Any, commit: str) -> str:
    """What changes with a file from one commit to another: the next run may meet a branch that has moved on."""
    stored = file.lfs.sha256 if file.lfs else file.blob_id
    return str(stored or commit)


def _problem(where: str, error: BaseException) -> SourceError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # fsspec's words for what the hub said
    if isinstance(error, GatedRepoError):
        return SourceError(f"{where}: the hub asks for access rights; {HINT}")
    if isinstance(error, RevisionNotFoundError):
        return SourceError(f"{where}: the hub has no such revision; check what follows @")
    if isinstance(error, RepositoryNotFoundError | FileNotFoundError):
        return SourceError(f"{where}: the hub has no (public) model of this name; check spelling, or `hf auth login`")
    return SourceError(
        f"{where}: the hub cannot be asked ({said(error)}); check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
    )
