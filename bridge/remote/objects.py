"""Models in object stores (s3://, gs://, and what else fsspec knows); listed and signed by fsspec, read in ranges."""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from bridge.errors import BridgeError, SourceError, UsageError
from bridge.remote.address import Look, scheme_of, shown, store_of
from bridge.remote.client import GIVEN_UP, TRIES, Client, Flow

SIGNED = 3600  # seconds that a signed address answers
S3 = "s3"
BUCKETS = (S3, "gs")  # extras of this package are called so too
REFUSALS = (  # of the libraries of clouds, which are no PermissionError
    "NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "DefaultCredentialsError", "RefreshError",
)  # fmt: skip
TAGS = ("ETag", "etag", "generation", "content_md5", "md5", "mtime", "LastModified", "modified", "created")
CREDENTIALS = {
    "s3": "check the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws) and that they may list and read the bucket; "
    "FSSPEC_S3_ANON=true asks without any",
    "gs": "check the credentials (gcloud auth application-default login) and that they may list and read the bucket",
}


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path in it; UsageError where what serves it is not installed."""
    scheme, store = scheme_of(url), store_of(url)
    try:
        from fsspec.config import conf
        from fsspec.core import url_to_fs

        options: dict[str, Any] = {"use_listings_cache": False}
        if store == S3:  # newer buckets take no other signature in an address
            options["config_kwargs"] = {"signature_version": "s3v4", **conf.get("s3", {}).get("config_kwargs", {})}
        fs, path = url_to_fs(url, **options)
    except ImportError as error:
        install = f"pip install 'qbridge[{store}]'" if store in BUCKETS else f"fsspec says: {error}"
        raise UsageError(f"{shown(url)}: what reads {scheme}:// is not installed; {install}") from error
    except ValueError as error:
        raise UsageError(f"{shown(url)}: nothing here knows {scheme}://; known: s3, gs, hf, https") from error
    return fs, path.rstrip("/")


def said(error: BaseException) -> str:
    """The first line of somebody else's error, without what an address in it was signed with."""
    lines = str(error).strip().splitlines()
    return re.sub(r"\?\S+|(?<=://)[^/\s@]*@", "", lines[0])[:200] if lines else type(error).__name__


def problem(url: str, doing: str, error: BaseException, kind: type[BridgeError]) -> BridgeError:
    """What a store said, as one sentence that tells what to do."""
    scheme = store_of(url)
    if isinstance(error, PermissionError) or type(error).__name__ in REFUSALS:
        return kind(f"{shown(url)}: access refused ({said(error)}); {CREDENTIALS.get(scheme, 'check the credentials')}")
    if isinstance(error, FileNotFoundError):
        return kind(f"{shown(url)}: not there; check the address: {scheme}://bucket/directory")
    return kind(f"{shown(url)}: cannot be {doing} ({said(error)}); check the address and the network, and run again")


def tag_of(info: Mapping[str, Any]) -> str:
    """What changes with an object, as far as its store tells."""
    found = next((info[key] for key in TAGS if info.get(key)), "")
    return str(found.timestamp() if hasattr(found, "timestamp") else found)  # a listing may have the number


class _Signed:
    """One object of S3: any signed address of it answers plain HTTP."""

    def __init__(self, fs: Any, path: str, where: str) -> None:
        self._fs, self._path, self.where = fs, path, where
        self.hint = CREDENTIALS["s3"]
        self._url, self._until = "", 0.0
        self._lock = threading.Lock()

    def request(self) -> tuple[str, Mapping[str, str]]:
        with self._lock:
            if not self._url or time.monotonic() > self._until:
                try:
                    self._url = self._fs.sign(self._path, expiration=SIGNED)
                except Exception as error:  # any of a store's library
                    raise problem(self.where, "read", error, SourceError) from error
                self._until = time.monotonic() + SIGNED / 2
            return self._url, {}

    def moved(self, url: str) -> None:
        """The next request is signed for the bucket again."""

    def refused(self, url: str) -> bool:
        """Sign anew: session credentials end, and signatures with them."""
        with self._lock:
            if url == self._url:
                self._url = ""
        return True


class ObjectStore:
    """The objects below one address. Those of S3 are read over plain HTTP: fsspec's loop copies on one thread."""

    def __init__(self, url: str, client: Client | None = None) -> None:
        self._fs, root = file_system(url)
        self._store, self.where = store_of(url), shown(url)
        self._client = client or Client()
        try:
            found = self._fs.find(root, detail=True)
        except Exception as error:  # any of a store's library
            raise problem(url, "listed", error, SourceError) from error
        if not found:
            raise SourceError(f"{self.where}: nothing is there; check the address: bucket/directory")
        self.only = ""
        if list(found) == [root]:
            root, _, self.only = root.rpartition("/")
            self.where = self.where.rpartition("/")[0]
        self._root = root
        below = f"{root}/"  # a store may list what nobody asked for
        names = {
            path.removeprefix(below): info for path, info in found.items() if path.startswith(below) and path != below
        }
        self.files: Mapping[str, Look] = {
            name: Look(int(info["size"]), tag_of(info)) for name, info in names.items() if not name.endswith("/")
        }
        self._signed = {name: _Signed(self._fs, f"{root}/{name}", f"{self.where}/{name}") for name in self.files}
        self._generations: dict[str, str] = {}
        if "generation" in inspect.signature(getattr(self._fs, "url", len)).parameters:  # that of gs:// takes one
            self._generations = {name: str(info["generation"]) for name, info in names.items() if "generation" in info}

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with bytes of an object."""
        if self._store == S3:
            self._client.fetch(self._signed[name], begin, out, self.files[name])
        else:
            self._cat(name, begin, out)

    def flow(self, name: str, begin: int, end: int) -> Flow | None:
        """Bytes of an object, to be read in order; None where that takes fsspec."""
        if self._store != S3:
            return None
        return self._client.flow(self._signed[name], begin, end, self.files[name])

    def give_up(self) -> None:
        """Fail what is being fetched."""
        self._client.give_up()

    def go_on(self) -> None:
        """Fetch again."""
        self._client.go_on()

    def _cat(self, name: str, begin: int, out: memoryview) -> None:
        """By fsspec: it retries what it knows; what ends short is asked for again from there."""
        where, done, failures = f"{self.where}/{name}", 0, 0
        while done < len(out):
            if self._client.given_up.wait(0.25 * 2**failures if failures else 0):
                raise SourceError(f"{where}: {GIVEN_UP}")
            try:
                data = self._of_the_same(name, begin + done, begin + len(out))
            except SourceError:
                raise
            except Exception as error:  # any of a store's library
                failures += 1
                if failures >= TRIES or isinstance(error, FileNotFoundError | PermissionError):
                    raise problem(where, "read", error, SourceError) from error
                continue
            failures = 0 if data else failures + 1
            if failures >= TRIES:
                raise SourceError(f"{where}: the store answers nothing, {TRIES} times in a row; run again")
            out[done : done + len(data)] = data
            done += len(data)

    def _of_the_same(self, name: str, begin: int, end: int) -> bytes:
        """Bytes of an object; SourceError where it is not the one that was listed any more."""
        path, known = f"{self._root}/{name}", self.files[name]
        changed = SourceError(f"{self.where}/{name}: changed since it was opened; nothing was kept, run again")
        if name in self._generations:  # check and read are one request
            try:
                return bytes(self._fs.cat_file(path, start=begin, end=end, generation=self._generations[name]))
            except FileNotFoundError:
                raise changed from None
        data = self._fs.cat_file(path, start=begin, end=end)
        info = self._fs.info(path)  # of now, so that the bytes are of no later one
        if (int(info["size"]), tag_of(info)) != (known.nbytes, known.tag):
            raise changed
        return bytes(data)
