"""Models on the hub by hf://org/name@revision, read in ranges, not cached."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from bridge.core.addresses import shown
from bridge.core.errors import SourceError
from bridge.core.remote.client import Client
from bridge.core.remote.exchange import Address
from bridge.core.remote.http import WebStore
from bridge.core.remote.objects import unsigned
from bridge.core.remote.store import RemoteStat

HINT = "request access to the model on the hub, and `hf auth login`"


class HubAddress(Address):
    """One file of a commit. The hub tells where it is stored; that address expires."""

    hint = HINT

    def __init__(self, url: str, where: str, token: str | None) -> None:
        super().__init__(url, {}, where)
        self._token = token
        self._stored = ""
        self._lock = threading.Lock()

    def request(self) -> tuple[str, Mapping[str, str]]:
        """Where it is stored; one thread asks the hub, the others wait. Another server must not see the token."""
        with self._lock:
            self._stored = self._stored or self._located()
            ours = self._token and urlsplit(self._stored).netloc == urlsplit(self._url).netloc
            return self._stored, {"Authorization": f"Bearer {self._token}"} if ours else {}

    def refused(self, url: str) -> bool:
        """The address in a store expires; what the hub itself refuses stays refused."""
        with self._lock:
            if url == self._stored:
                self._stored = ""
        return urlsplit(url).netloc != urlsplit(self._url).netloc

    def _located(self) -> str:
        from huggingface_hub import get_hf_file_metadata

        try:
            return get_hf_file_metadata(self._url, token=self._token or False).location
        except Exception as error:  # any of the hub's library
            raise _problem(self.where, error) from error


class HubStore(WebStore):
    """The files of one commit, which do not change: a branch may move on while it is read."""

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfApi, HfFileSystem, get_token, hf_hub_url
        from huggingface_hub.hf_file_system import HfFileSystemResolvedRepositoryPath

        super().__init__(shown(url), Client())
        try:
            # an instance of before remembers what was not there
            at = HfFileSystem(skip_instance_cache=True).resolve_path(self.where)
            if not isinstance(at, HfFileSystemResolvedRepositoryPath) or at.repo_type != "model":
                raise SourceError(f"{self.where}: not a model of the hub; give hf://org/name")
            hub = HfApi()
            info = hub.model_info(at.repo_id, revision=at.revision, files_metadata=True)
            if not isinstance(info.sha, str) or not info.sha:
                raise SourceError(f"{self.where}: the hub names no commit of it; check HF_ENDPOINT, and run again")
            looks = {}
            for file in info.siblings or ():
                tag = file.lfs.sha256 if file.lfs else file.blob_id  # the next run may find the branch elsewhere
                looks[str(file.rfilename)] = RemoteStat(file.size or 0, str(tag or info.sha))
        except SourceError:
            raise
        except Exception as error:  # any of the hub's library
            raise _problem(self.where, error) from error
        below = f"{at.path_in_repo}/" if at.path_in_repo else ""
        if at.path_in_repo and at.path_in_repo in looks:
            below = at.path_in_repo[: at.path_in_repo.rfind("/") + 1]
            self.where = self.where.rpartition("/")[0]
            looks = {at.path_in_repo: looks[at.path_in_repo]}
        self.files = {name.removeprefix(below): look for name, look in looks.items() if name.startswith(below)}
        if not self.files:
            raise SourceError(f"{self.where}: nothing is there; check the directory after org/name")
        token = get_token()
        self._addresses: dict[str, HubAddress] = {}
        for name in self.files:
            at_commit = hf_hub_url(at.repo_id, f"{below}{name}", revision=info.sha, endpoint=hub.endpoint)
            self._addresses[name] = HubAddress(at_commit, f"{self.where}/{name}", token)

    def address(self, name: str) -> HubAddress:
        return self._addresses[name]

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        """The content of a commit does not change, and its ETag is another where it is stored."""
        self._client.fetch(self._addresses[name], begin, out, self.files[name]._replace(tag=""))


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
        f"{where}: the hub cannot be asked ({unsigned(error)}); check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
    )
