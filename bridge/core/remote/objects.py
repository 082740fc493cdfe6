"""Models in object stores by obstore, in other stores by fsspec."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from bridge.core.addresses import scheme_of, shown, store_of
from bridge.core.errors import BridgeError, SourceError, UsageError, first_line
from bridge.core.remote.readers import GIVEN_UP, result, start
from bridge.core.remote.store import RemoteStat, Store, check_names
from bridge.core.version import install

BUCKETS = ("s3", "gs", "az")  # the extras of this package have the same names
REQUEST = 8 << 20  # bytes of one request, which has to end within `LIMITS`
PART = 16 << 20  # bytes of a part of an upload: S3 takes 10,000 of them, 156 GB
LIMITS = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "300s", "user_agent": "qbridge"}
RETRIES = 6
FIRST_RETRIES = 1  # of a store that never answered: somebody waits for each timeout
RETRY_TIMEOUT = timedelta(minutes=3)
MAX_LISTED = 1_000_000  # files below one address
PASSING = ("408", "429", "500", "502", "503", "504")
REFUSALS = (  # of botocore and of fsspec's libraries
    "NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "DefaultCredentialsError", "RefreshError",
    "ProfileNotFound", "PermissionDeniedError", "UnauthenticatedError",
)  # fmt: skip
TAGS = ("ETag", "etag", "e_tag", "generation", "content_md5", "md5", "mtime", "LastModified", "modified", "created")
CREDENTIALS = {
    "s3": "check the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws) and that they may list and read the bucket; "
    "AWS_SKIP_SIGNATURE=true asks without any",
    "gs": "check the credentials (gcloud auth application-default login) and that they may list and read the bucket; "
    "GOOGLE_SKIP_SIGNATURE=true asks without any",
    "az": "check the credentials (AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY, or after az login "
    "AZURE_USE_AZURE_CLI=true) and that they may list and read the container; "
    "AZURE_SKIP_SIGNATURE=true asks without any",
}

T = TypeVar("T")


class BusyError(OSError):
    """A store that answers, but not now."""


class InvalidNameError(OSError):
    """An object whose name is not a path."""


class Bucket:
    """The objects below an address in S3, Google's or Azure's store, by their names relative to it. Raises OSError.

    obstore retries, and sends large files in parts; an object is seen only when it is whole.
    """

    def __init__(self, url: str) -> None:
        import obstore

        self._obs, self._kind = obstore, store_of(url)
        if self._kind == "s3":
            import boto3  # noqa: F401
        self._bucket, _, self._root = shown(url).partition("://")[2].partition("/")

    @cached_property
    def _config(self) -> tuple[dict[str, Any], Any]:
        """How obstore opens the bucket, and boto3's client of S3."""
        config, client = {"s3": _s3, "gs": _gs, "az": _az}[self._kind](self._bucket)
        plain = str(config.get("endpoint", config.get("base_url", ""))).startswith("http://")
        more = {"credential_provider": config.pop("provider")} if "provider" in config else {}
        return {"config": config, "client_options": {**LIMITS, "allow_http": plain}, **more}, client

    def _opened(self, retries: int) -> Any:
        stores = self._obs.store
        make = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[self._kind]
        return make(
            self._bucket, retry_config={"max_retries": retries, "retry_timeout": RETRY_TIMEOUT}, **self._config[0]
        )

    @cached_property
    def _store(self) -> Any:
        return self._opened(RETRIES)

    def list(self) -> dict[str, RemoteStat]:
        """All objects; "" is the name of the address itself, if it is one."""
        try:
            return _call(lambda: self._list(self._opened(FIRST_RETRIES)))
        except BusyError:
            return _call(lambda: self._list(self._store))

    def _list(self, store: Any) -> dict[str, RemoteStat]:
        rows: dict[str, RemoteStat] = {}
        for some in self._obs.list(store, prefix=self._root or None):
            rows.update((meta["path"], _stat(meta)) for meta in some)
            if len(rows) > MAX_LISTED:
                raise OSError(f"more than {MAX_LISTED} files")
        # Placeholders of folders are not files, nor is what a store lists beside the prefix that it was asked for.
        folders = {str(one) for path in rows for one in PurePosixPath(path).parents}
        below = f"{self._root}/".lstrip("/")
        found = {
            path.removeprefix(below): look
            for path, look in rows.items()
            if path.startswith(below) and path not in folders
        }
        if not found and self._root:
            with suppress(FileNotFoundError):
                found[""] = _stat(self._obs.head(store, self._root))
        return found

    def read(self, name: str, begin: int, end: int) -> tuple[RemoteStat, Any]:
        """The present metadata of an object, and its bytes from `begin` on: at least one, and none after `end`."""
        with _plain():
            got = self._obs.get(self._store, self._path(name), options={"range": (begin, min(end, begin + REQUEST))})
            return _stat(got.meta), got.bytes()

    def stat(self, name: str) -> RemoteStat:
        return _call(lambda: _stat(self._obs.head(self._store, self._path(name))))

    def put(self, name: str, content: bytes | Path) -> None:
        _call(lambda: self._obs.put(self._store, self._path(name), content, chunk_size=PART))

    def remove(self, name: str) -> None:
        _call(lambda: self._obs.delete(self._store, self._path(name)))

    def end_uploads(self) -> None:
        """End multipart uploads that a killed run left: S3 keeps and bills them until somebody does."""
        if client := self._config[1]:
            kept = client.list_multipart_uploads(Bucket=self._bucket, Prefix=f"{self._root}/").get("Uploads", [])
            for one in kept:
                client.abort_multipart_upload(Bucket=self._bucket, Key=one["Key"], UploadId=one["UploadId"])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".strip("/")


class FsspecFolder:
    """The same of another store."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations, registry

        scheme = scheme_of(url)
        if scheme not in (*known_implementations, *registry):
            raise UsageError(f"{shown(url)}: nothing here knows {scheme}://; known: s3, gs, az, hf, https")
        with reporting(url, "opened", SourceError), _plain(every=True):  # some connect at once
            self._fs, root = url_to_fs(url, use_listings_cache=False)
        self._root = root.rstrip("/")

    def list(self) -> dict[str, RemoteStat]:
        with _plain(every=True):
            self._fs.invalidate_cache()
            return {
                path.removeprefix(self._root).lstrip("/"): _stat(info)
                for path, info in self._fs.find(self._root, detail=True).items()
                if f"{path}/".startswith(f"{self._root}/") and not path.endswith("/")
            }

    def read(self, name: str, begin: int, end: int) -> tuple[RemoteStat, Any]:
        with _plain(every=True):
            data = self._fs.cat_file(f"{self._root}/{name}", start=begin, end=end)
        return self.stat(name), data  # in this order: the bytes are of no later version

    def stat(self, name: str) -> RemoteStat:
        with _plain(every=True):
            return _stat(self._fs.info(f"{self._root}/{name}"))

    def put(self, name: str, content: bytes | Path) -> None:
        with _plain(every=True):
            if isinstance(content, bytes):
                self._fs.pipe_file(f"{self._root}/{name}", content)
            else:
                self._fs.put_file(os.fspath(content), f"{self._root}/{name}")

    def remove(self, name: str) -> None:
        with _plain(every=True):
            self._fs.rm_file(f"{self._root}/{name}")

    def end_uploads(self) -> None:
        """fsspec lists none."""


Folder = Bucket | FsspecFolder


def folder(url: str) -> Folder:
    """The objects below an address; UsageError if what serves it is not installed."""
    scheme, store = scheme_of(url), store_of(url)
    try:
        return Bucket(url) if store in BUCKETS else FsspecFolder(url)
    except ImportError as error:
        remedy = install(store) if store in BUCKETS else f"fsspec says: {error}"
        raise UsageError(f"{shown(url)}: what reads {scheme}:// is not installed; {remedy}") from error


class ObjectStore(Store):
    """The objects below one address, as a store that is read."""

    def __init__(self, url: str) -> None:
        self.where, self.given_up, self._folder = shown(url), threading.Event(), folder(url)
        with reporting(url, "listed", SourceError):
            try:
                self.files = self._folder.list()
            except InvalidNameError as error:
                check_names([str(error)], self.where)
                raise
        if not self.files:
            raise SourceError(f"{self.where}: nothing is there; check the address: bucket/directory")
        self._only = [*self.files] == [""]
        if self._only:
            self.where, _, name = self.where.rpartition("/")
            self.files = {name: self.files[""]}

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with bytes of an object; SourceError if it is not the one that was listed any more."""
        where, done = f"{self.where}/{name}", 0
        while done < len(out):
            if self.given_up.is_set():
                raise SourceError(f"{where}: {GIVEN_UP}")
            with reporting(where, "read", SourceError):
                look, data = self._folder.read("" if self._only else name, begin + done, begin + len(out))
            if look != self.files[name] or not data:
                raise SourceError(f"{where}: changed since it was opened; nothing was kept, run again")
            piece = np.frombuffer(data, np.uint8)  # NumPy copies without the GIL
            np.frombuffer(out, np.uint8)[done : done + len(piece)] = piece
            done += len(piece)


def _s3(bucket: str) -> tuple[dict[str, Any], Any]:
    """As boto3 finds endpoint, region and credentials: obstore does not look for them in ~/.aws."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.Session()
    unsigned = os.environ.get("AWS_SKIP_SIGNATURE", os.environ.get("FSSPEC_S3_ANON", "")).lower() in ("true", "1")
    if not unsigned and session.get_credentials() is None:
        raise PermissionError("Unable to locate credentials")
    limits = Config(connect_timeout=10, read_timeout=30, retries={"total_max_attempts": 1})
    client = session.client("s3", config=limits.merge(Config(signature_version=UNSIGNED)) if unsigned else limits)
    config: dict[str, Any] = {"region": _region(client, bucket) or client.meta.region_name}
    if ".amazonaws.com" not in client.meta.endpoint_url:
        config["endpoint"] = client.meta.endpoint_url
    if unsigned:
        return config | {"skip_signature": True}, None
    return config | {"provider": Boto3CredentialProvider(session)}, client


def _region(client: Any, bucket: str) -> str:
    """The region of a bucket, which S3 names in refusals too; obstore follows no redirect to it."""
    from botocore.exceptions import ClientError

    try:
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    except Exception:  # no answer: the next request says why
        return ""
    named = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
    return named if re.fullmatch("[a-z0-9-]{1,63}", named) else ""  # it becomes a part of a host's name


def _gs(bucket: str) -> tuple[dict[str, Any], Any]:
    """An emulator has no users, but obstore does not write without a token."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    return {"base_url": emulator, "bearer_token": "anonymous"} if emulator else {}, None


def _az(bucket: str) -> tuple[dict[str, Any], Any]:
    """A connection string, as Azure's portal shows it; obstore reads the other variables."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    named = {"AccountName": "account_name", "AccountKey": "account_key", "SharedAccessSignature": "sas_key",
             "BlobEndpoint": "endpoint"}  # fmt: skip
    config = {name: parts[part] for part, name in named.items() if part in parts}
    if endpoint := os.environ.get("AZURE_STORAGE_ENDPOINT"):
        config.setdefault("endpoint", endpoint)
    return config, None


def _stat(info: Mapping[str, Any]) -> RemoteStat:
    """What a store says of an object."""
    tag = next((info[key] for key in TAGS if info.get(key)), "")
    if not tag and "last_modified" in info:  # obstore's: a listing may have the fraction of the second
        tag = int(info["last_modified"].timestamp())
    tag = str(tag.timestamp() if isinstance(tag, datetime) else tag)
    return RemoteStat(int(info["size"]), tag.removeprefix("W/").strip('"'))


def _call(call: Callable[[], T]) -> T:
    """Call obstore in another thread: it does not look at signals while it waits."""
    with _plain():
        return result(start(call), threading.Event(), "")


@contextmanager
def _plain(every: bool = False) -> Iterator[None]:
    """Raise OSErrors instead of obstore's errors, which quote addresses with their signatures; instead of `every`."""
    try:
        yield
    except Exception as error:
        text, name = str(error), type(error).__name__
        ours = "\n\nDebug source:" in text
        if isinstance(error, OSError) and not ours:
            raise
        if not ours and not every and type(error).__module__.partition(".")[0] not in ("botocore", "boto3", "obstore"):
            raise
        status, kind = (re.search(word, text) for word in (r"status: (\d+)", r"kind: (Connect|Timeout|\w+)"))
        if name == "InvalidPathError" and (path := re.search(r'path: "(.*)",', text)):
            raise InvalidNameError(path[1]) from None
        found = BusyError if status and status[1] in PASSING else OSError
        if kind and kind[1] in ("Connect", "Timeout"):
            found = ConnectionRefusedError if kind[1] == "Connect" else TimeoutError
        if isinstance(error, FileNotFoundError) or (status and status[1] == "404"):
            found = FileNotFoundError
        if name in REFUSALS or (status and status[1] in ("401", "403")):
            found = PermissionError
        line = text.partition("\n")[0].rpartition("status code: ")[2].partition(":")[0] if ours else unsigned(error)
        raise found(line + (f" ({kind[1].lower()})" if kind and ours else "")) from None


def unsigned(error: BaseException) -> str:
    """The first line of another library's error, without what an address in it was signed with."""
    return re.sub(r"\?\S+|(?<=://)[^/\s@]*@", "", first_line(error))[:200]


@contextmanager
def reporting(url: str, doing: str, kind: type[BridgeError]) -> Iterator[None]:
    """Raise a store's OSError as a `kind`: one sentence with its remedy."""
    try:
        yield
    except PermissionError as error:
        remedy = CREDENTIALS.get(store_of(url), "check the credentials")
        raise kind(f"{shown(url)}: access refused ({unsigned(error)}); {remedy}") from error
    except FileNotFoundError as error:
        raise kind(f"{shown(url)}: not there; check the address: {store_of(url)}://bucket/directory") from error
    except OSError as error:
        what = f"cannot be {doing} ({unsigned(error)}); check the address and the network, and run again"
        raise kind(f"{shown(url)}: {what}") from error
