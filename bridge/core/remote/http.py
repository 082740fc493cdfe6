"""Models at https:// (and http://): servers list nothing, so the files that a model may have are asked for by name."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from bridge.container import is_page
from bridge.errors import SourceError
from bridge.json_data import parse_json
from bridge.planning import CALIBRATION
from bridge.remote.address import Look, shown
from bridge.remote.client import Client, Flow
from bridge.remote.exchange import WEB_PAGE, RefusedError

TOGETHER = 8  # requests at once while names are asked for
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
META = "params.json"
MANIFEST = "bridge.json"  # of our own outputs
OURS = ("report.json", CALIBRATION)  # beside a manifest, which does not name them
WRITTEN = re.compile(rb'"file": ?"([^"\\]{1,255})"')  # of a manifest: not parsed, since it may have 10**7 values
MOST_JSON = 1 << 28
MOST_FILES = 10_000  # that an index or a manifest names; the largest models are some hundred
MOST_RANKS = 128  # of Meta's checkpoints: theirs have 16 at most
# What is carried along; an address has no listing, so a file by another name is not seen.
BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "tekken.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "hf_quant_config.json", MANIFEST, "README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE",
)  # fmt: skip
FILES = (".safetensors", ".bin", ".nemo", ".pth")  # an address that ends so is that of one file


@dataclass(frozen=True)
class HttpAddress:
    """One file of a server, with what the user's address had beside the path: a password, a signature."""

    url: str
    headers: Mapping[str, str]
    hint: str = "give an address that may be read: https://user:password@host/..., or a signed one"

    @property
    def where(self) -> str:
        return unquote(shown(self.url))

    def request(self) -> tuple[str, Mapping[str, str]]:
        return self.url, self.headers

    def moved(self, url: str) -> None:
        """A redirection is followed anew each time: it may be signed for seconds."""

    def refused(self, url: str) -> bool:
        """The user's own address is all there is."""
        return False


class HttpStore:
    """The files of one address."""

    def __init__(self, url: str, client: Client | None = None) -> None:
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        self._headers = {"Authorization": f"Basic {base64.b64encode(unquote(user).encode()).decode()}"} if user else {}
        self._parts = parts._replace(netloc=host, path=parts.path.rstrip("/"), fragment="")
        self._client = client or Client()
        self.only = ""
        if parts.path.endswith(FILES):
            base, _, self.only = self._parts.path.rpartition("/")
            self._parts, self.only = self._parts._replace(path=base), unquote(self.only)
        self.where = unquote(shown(urlunsplit(self._parts)))
        self._refused: dict[str, RefusedError] = {}
        self.files: Mapping[str, Look] = self._find()

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file."""
        self._client.fetch(self._address(name), begin, out, self.files[name])

    def flow(self, name: str, begin: int, end: int) -> Flow:
        """Bytes of a file, to be read in order."""
        return self._client.flow(self._address(name), begin, end, self.files[name])

    def give_up(self) -> None:
        """Fail what is being fetched."""
        self._client.give_up()

    def go_on(self) -> None:
        """Fetch again."""
        self._client.go_on()

    def _address(self, name: str) -> HttpAddress:
        url = urlunsplit(self._parts._replace(path=f"{self._parts.path}/{quote(name)}"))
        return HttpAddress(url, self._headers)

    def _find(self) -> dict[str, Look]:
        if self.only.endswith(".nemo"):
            return self._ask([self.only], needed=True)
        wanted = [*INDICES, *SINGLE, META] if not self.only else [self.only]
        found = self._ask([*BESIDE, *wanted, *([META] if self.only.endswith(".pth") else [])])
        if self.only and self.only not in found:
            self._tell_refused([self.only])
            raise SourceError(f"{self.where}/{self.only}: not there (404); check the address")
        for index in () if self.only else INDICES:
            if index in found:
                found |= self._ask(self._named(index, found[index]), needed=True)
        if MANIFEST in found and not self.only:
            found |= self._ask(sorted(self._written(found[MANIFEST]) - found.keys()))
        if META in found:
            found |= self._ranks(found[META])
        if found.keys() <= {*BESIDE, *OURS, *INDICES, META}:
            self._tell_refused(sorted(self._refused.keys() - {*BESIDE, *OURS}))
        if not found:
            raise SourceError(
                f"{self.where}: none of the files of a model is there (config.json, {SINGLE[0]}, {INDICES[0]}, ...); "
                "give the address of the directory that holds them"
            )
        return found

    def _named(self, index: str, look: Look) -> list[str]:
        """The files that an index names; what is wrong with it is said by who reads it again."""
        try:
            names = set(parse_json(self._content(index, look))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return []
        return self._few(index, {name for name in names if isinstance(name, str) and "/" not in name})

    def _written(self, look: Look) -> set[str]:
        """The files that a plan of ours says were written."""
        names = {match[1].decode(errors="replace") for match in WRITTEN.finditer(self._content(MANIFEST, look))}
        return {*OURS, *self._few(MANIFEST, {name for name in names if ".." not in name.split("/")})}

    def _tell_refused(self, names: list[str]) -> None:
        """Say that weights may not be read, where none are there that may."""
        if refused := [self._refused[name] for name in names if name in self._refused]:
            raise refused[0]

    def _few(self, index: str, names: set[str]) -> list[str]:
        if len(names) > MOST_FILES:
            raise SourceError(f"{self.where}/{index}: names {len(names)} files; at most {MOST_FILES} are asked for")
        return sorted(names)

    def _ranks(self, look: Look) -> dict[str, Look]:
        """The files of Meta's ranks, which nothing names; not asked for where the server takes any name for a file."""
        found: dict[str, Look] = {}
        try:
            if not isinstance(parse_json(self._content(META, look)), dict):
                raise ValueError("no JSON object")
        except ValueError as error:
            raise SourceError(f"{self.where}/{META}: not JSON ({error}); check the address") from None
        while more := self._ask([f"consolidated.{len(found):02}.pth"]):
            found |= more
            if len(found) > MOST_RANKS:
                raise SourceError(
                    f"{self.where}: more than {MOST_RANKS} files consolidated.*.pth; does the server answer "
                    "for names that are not there? Download the model first"
                )
        return found

    def _content(self, name: str, look: Look) -> bytes:
        if look.nbytes > MOST_JSON:
            raise SourceError(f"{self.where}/{name}: {look.nbytes} bytes; at most {MOST_JSON} are read of such a file")
        data = bytearray(look.nbytes)
        self._client.fetch(self._address(name), 0, memoryview(data), look)
        return bytes(data)

    def _ask(self, names: Iterable[str], needed: bool = False) -> dict[str, Look]:
        """Those of the files that are there. A refusal of one that need not be there is an answer."""

        def look(name: str) -> Look | None:
            try:
                return self._client.look(self._address(name))
            except RefusedError as error:
                if needed:
                    raise
                self._refused[name] = error  # object stores answer so where listing is not allowed
                return None

        every = list(names)
        with ThreadPoolExecutor(TOGETHER) as pool:
            try:
                looks = list(pool.map(look, every))
            except BaseException:  # a signal too: who waits for the others would wait for a server
                self._client.give_up()
                raise
        found = {name: seen for name, seen in zip(every, looks, strict=True) if seen is not None}
        if pages := [name for name in found if name.endswith((".json", *FILES)) and is_page(found[name].head)]:
            raise SourceError(f"{self._address(pages[0]).where}: {WEB_PAGE}")
        if unread := [name for name in found if not found[name].ranges and name.endswith(FILES)]:
            raise SourceError(
                f"{self._address(unread[0]).where}: the server sends whole files only (no byte ranges), which would "
                "bring the model here whole; use a server that serves ranges, or download it first"
            )
        return found
