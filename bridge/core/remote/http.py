"""Models at https:// and http://.

Servers list nothing: the files that a model may have are asked for by name.
"""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from bridge.core.addresses import shown
from bridge.core.errors import SourceError
from bridge.core.output.names import CALIBRATION, MANIFEST
from bridge.core.parsing.limited import parse_json
from bridge.core.remote.client import Client
from bridge.core.remote.exchange import WEB_PAGE, WHOLE_FILES, Address, RefusedError
from bridge.core.remote.readers import result, start
from bridge.core.remote.store import RemoteStat, Store, is_page

TOGETHER = 8  # requests at once while names are asked for
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
META = "params.json"
OURS = ("report.json", CALIBRATION)  # beside a manifest, which does not name them
WRITTEN = re.compile(rb'"file": ?"([^"\\]{1,255})"')  # of a manifest: not parsed, since it may have 10**7 values
MAX_JSON = 1 << 28  # bytes of an index, a manifest or params.json on a web server
MAX_FILES = 10_000  # files that an index or a manifest names; the largest models have some hundred
MAX_RANKS = 128  # files of a checkpoint of Meta's: theirs have 16 at most
# What is copied along; a server has no listing, so a file with another name is not found.
BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "tekken.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "hf_quant_config.json", MANIFEST, "README.md", "LICENSE",
    "LICENSE.txt", "LICENSE.md", "NOTICE",
)  # fmt: skip
FILES = (".safetensors", ".bin", ".nemo", ".pth")  # an address that ends so is that of one file


class WebStore(Store):
    """Files at addresses of the web."""

    def __init__(self, where: str, client: Client) -> None:
        self.where, self._client, self.given_up = where, client, client.given_up

    def address(self, name: str) -> Address:
        raise NotImplementedError

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        self._client.fetch(self.address(name), begin, out, self.files[name])


class HttpStore(WebStore):
    """The files of one address."""

    def __init__(self, url: str, client: Client | None = None) -> None:
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        self._headers = {"Authorization": f"Basic {base64.b64encode(unquote(user).encode()).decode()}"} if user else {}
        path, self._only = parts.path.rstrip("/"), ""
        if parts.path.endswith(FILES):
            path, _, name = path.rpartition("/")
            self._only = unquote(name)
        self._parts = parts._replace(netloc=host, path=path, fragment="")
        super().__init__(unquote(shown(urlunsplit(self._parts))), client or Client())
        self._refused: dict[str, RefusedError] = {}
        self.files = self._one() if self._only else self._all()

    def address(self, name: str) -> Address:
        url = urlunsplit(self._parts._replace(path=f"{self._parts.path}/{quote(name)}"))
        return Address(url, self._headers)

    def _one(self) -> dict[str, RemoteStat]:
        """The file that the address names, and what may lie beside it."""
        if self._only.endswith(".nemo"):
            found = self._ask([self._only], needed=True)
        else:
            found = self._ask([*BESIDE, self._only, *([META] if self._only.endswith(".pth") else [])])
        if self._only not in found:
            self._raise_refused([self._only])
            raise SourceError(f"{self.where}/{self._only}: not there (404); check the address")
        return found | (self._ranks(found[META]) if META in found else {})

    def _all(self) -> dict[str, RemoteStat]:
        found = self._ask([*BESIDE, *INDICES, *SINGLE, META])
        for index in INDICES:
            if index in found:
                found |= self._ask(self._named(index, found[index]), needed=True)
        if MANIFEST in found:
            found |= self._ask(sorted(self._written(found[MANIFEST]) - found.keys()))
        if META in found:
            found |= self._ranks(found[META])
        if found.keys() <= {*BESIDE, *OURS, *INDICES, META}:
            self._raise_refused(sorted(self._refused.keys() - {*BESIDE, *OURS}))
        if not found:
            raise SourceError(
                f"{self.where}: none of the files of a model is there (config.json, {SINGLE[0]}, {INDICES[0]}, ...); "
                "give the address of the directory that holds them"
            )
        return found

    def _named(self, index: str, look: RemoteStat) -> list[str]:
        """The files that an index names; who reads it again says what is wrong with it."""
        try:
            names = set(parse_json(self._content(index, look))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return []
        return self._few(index, {name for name in names if isinstance(name, str) and "/" not in name})

    def _written(self, look: RemoteStat) -> set[str]:
        """The files that a plan of ours says were written."""
        names = {match[1].decode(errors="replace") for match in WRITTEN.finditer(self._content(MANIFEST, look))}
        return {*OURS, *self._few(MANIFEST, {name for name in names if ".." not in name.split("/")})}

    def _raise_refused(self, names: list[str]) -> None:
        """Say that weights may not be read, if there are none that may."""
        if refused := [self._refused[name] for name in names if name in self._refused]:
            raise refused[0]

    def _few(self, index: str, names: set[str]) -> list[str]:
        if len(names) > MAX_FILES:
            raise SourceError(f"{self.where}/{index}: names {len(names)} files; at most {MAX_FILES} are asked for")
        return sorted(names)

    def _ranks(self, look: RemoteStat) -> dict[str, RemoteStat]:
        """The files of Meta's ranks, which nothing names."""
        found: dict[str, RemoteStat] = {}
        try:
            if not isinstance(parse_json(self._content(META, look)), dict):
                raise ValueError("no JSON object")
        except ValueError as error:
            raise SourceError(f"{self.where}/{META}: not JSON ({error}); check the address") from None
        while more := self._ask([f"consolidated.{len(found):02}.pth"]):
            found |= more
            if len(found) > MAX_RANKS:
                raise SourceError(
                    f"{self.where}: more than {MAX_RANKS} files consolidated.*.pth; does the server answer "
                    "for names that are not there? Download the model first"
                )
        return found

    def _content(self, name: str, look: RemoteStat) -> bytes:
        if look.nbytes > MAX_JSON:
            raise SourceError(f"{self.where}/{name}: {look.nbytes} bytes; at most {MAX_JSON} are read of such a file")
        data = bytearray(look.nbytes)
        self._client.fetch(self.address(name), 0, memoryview(data), look)
        return bytes(data)

    def _ask(self, names: Iterable[str], needed: bool = False) -> dict[str, RemoteStat]:
        """Those of the files that are there. A refusal means "not there" for a file that is not `needed`."""

        def look(name: str) -> RemoteStat | None:
            with gate:
                try:
                    return self._client.look(self.address(name))
                except RefusedError as error:
                    if needed:
                        raise
                    self._refused[name] = error  # object stores answer so if listing is not allowed
                    return None

        every, gate, found = list(names), threading.Semaphore(TOGETHER), dict[str, RemoteStat]()
        try:
            for at in range(0, len(every), 64):  # a thread each, of which `TOGETHER` ask
                some = every[at : at + 64]
                asked: list[Future[RemoteStat | None]] = [start(partial(look, name)) for name in some]
                for name, future in zip(some, asked, strict=True):
                    if stat := result(future, self.given_up, self.where):
                        found[name] = stat
        except BaseException:  # a signal too
            self.given_up.set()
            raise
        if pages := [name for name in found if name.endswith((".json", *FILES)) and is_page(found[name].head)]:
            raise SourceError(f"{self.address(pages[0]).where}: {WEB_PAGE}")
        if unread := [name for name in found if not found[name].ranges and name.endswith(FILES)]:
            raise SourceError(f"{self.address(unread[0]).where}: {WHOLE_FILES}")
        return found
