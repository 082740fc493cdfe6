"""What stores and the hub list, through obstore and huggingface_hub, against ElementTree and `json`.

Correct is: the files are all those of the listing below the directory, with their sizes, of however many pages it has;
else a clean error. Neither a name that leads out of the directory, nor a size that no file has, is ever handed on.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape, unescape

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.remote.hub import HubStore
from bridge.core.remote.objects import ObjectStore
from bridge.core.remote.path import RemoteTree, Store
from tests.core.remote.server import Quiet
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import encoded, jsons, texts

XML, GS, HUB = "s3.xml", "gs.xml", "hf.json"
BETWEEN = "\n----\n"  # pages of a listing
NAMES = ("config.json", "model.safetensors", "sub/a.bin", "sub/deep/b.bin", "sub/")
KEYS = (  # after the folder: of its files, of its placeholders, of none
    *(f"/{name}" for name in NAMES), "/a b", "/ü", "/&<>", "/.hidden", "/sub", "/A" * 40, "", "/", "x/y", "//x",
    "/../x",
)  # fmt: skip
Rows = list[tuple[str, int]]  # keys and sizes: a page of a listing
DATE = "2026-01-01T00:00:00.000Z"
SPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
WORDS = (
    "../../x", "model/../x", "model/", "model//x", "&#0;", "&#x1b;", "&lt;", "<!DOCTYPE a [<!ENTITY b 'c'>]>", "&b;",
    "Contents", "Key", "Size", "LastModified", "ETag", "IsTruncated", "true", "NextContinuationToken", "CommonPrefixes",
    BETWEEN, "false", "<IsTruncated>true</IsTruncated>",
)  # fmt: skip


class _Pages(BaseHTTPRequestHandler):
    """A store that answers by pages: the first, or, to a request with a token, the one after the last."""

    protocol_version = "HTTP/1.1"
    pages: list[bytes]
    at = 0

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        said = type(self)
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        said.at = said.at + 1 if "continuation-token" in query else 0
        there = "list-type" in query and said.at < len(said.pages)
        body = said.pages[said.at] if there else b""
        self.send_response(200 if there else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        """The address as that of one object, which has the size that the listing says, if it is listed."""
        name = unquote(urlsplit(self.path).path).partition("/bucket/")[2]
        found = dict(_listed(type(self).pages)).get(name)
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(found or 0))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()


@cache
def _server() -> str:
    server = Quiet(("127.0.0.1", 0), _Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def make(root: Path) -> None:
    rows = [(f"{root.name}/{name}", at * 1000) for at, name in enumerate(NAMES)]
    pages = [rows[:2], rows[2:3], rows[3:]]
    (root / XML).write_bytes(_xml(pages))
    (root / GS).write_bytes(_xml(pages))
    (root / HUB).write_text(json.dumps(_hub([(name, at * 1000) for at, name in enumerate(NAMES[:-1])])))


def _xml(pages: list[Rows]) -> bytes:
    """A listing of S3, and of Google's store when it is asked as S3."""
    texts = []
    for number, rows in enumerate(pages, 1):
        more = f"<NextContinuationToken>{number}</NextContinuationToken>" if number < len(pages) else ""
        said = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{DATE}</LastModified>"
            f'<ETag>"{size}"</ETag><Size>{size}</Size></Contents>\n'
            for key, size in rows
        )
        texts.append(
            f'<?xml version="1.0"?>\n<ListBucketResult xmlns="{SPACE[1:-1]}"><Name>bucket</Name>'
            f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}\n{said}</ListBucketResult>"
        )
    return BETWEEN.join(texts).encode()


def _hub(rows: Rows) -> dict[str, Any]:
    """What the hub says of a model."""
    files = [{"rfilename": name, "size": size, "blobId": f"{size}"} for name, size in rows]
    for file in files[1:2]:
        file["lfs"] = {"size": file["size"], "sha256": "a" * 64, "pointerSize": 134}
    return {"id": "org/model", "sha": "b" * 40, "siblings": files, "tags": []}


def cases(root: Path) -> SearchStrategy[Case]:
    xml = encoded(texts((root / XML).read_text(), WORDS))
    hub = jsons(json.loads((root / HUB).read_text()))
    changed = st.one_of(xml.map(_only(XML)), xml.map(_only(GS)), hub.map(_only(HUB)))
    keys = st.one_of(st.sampled_from(KEYS).map(lambda key: root.name + key), st.just(f"else/{root.name}/x"))
    pages = st.lists(st.lists(st.tuples(keys, st.integers(0, 1 << 62)), max_size=5), min_size=1, max_size=4)
    sound = st.one_of(
        pages.map(_xml).map(_only(XML)),
        pages.map(_xml).map(_only(GS)),
        pages.map(lambda pages: json.dumps(_hub(_below(root, pages))).encode()).map(_only(HUB)),
    )
    return st.one_of(changed, changed, sound)


def _below(root: Path, pages: list[Rows]) -> Rows:
    return [(key.removeprefix(f"{root.name}/"), size) for rows in pages for key, size in rows]


def _only(name: str) -> Callable[[bytes], Case]:
    """The case in which one of them answers."""
    return lambda content: dict.fromkeys((XML, GS, HUB)) | {name: content}


def read(root: Path) -> dict[str, dict[str, int]]:
    found = {}
    for name in (XML, GS, HUB):
        if (root / name).exists():
            tree = RemoteTree((_of_the_hub if name == HUB else _of_a_bucket)(root, name))
            found[name] = {file: look.nbytes for file, look in tree.store.files.items()}
    return found


def _of_a_bucket(root: Path, name: str) -> Store:
    store, endpoint = name[:2], "endpoint" if name == XML else "base_url"
    _Pages.pages = (root / name).read_bytes().split(BETWEEN.encode())

    def found(bucket: str) -> tuple[dict[str, Any], None]:
        return {endpoint: _server(), "skip_signature": True}, None

    with patch(f"bridge.core.remote.objects._{store}", found):
        return ObjectStore(f"{store}://bucket/{root.name}")


def _of_the_hub(root: Path, name: str) -> Store:
    def get(url: str, params: dict[str, Any], **more: Any) -> SimpleNamespace:
        said = (
            (root / name).read_bytes() if params else b'{"id": "org/model"}'
        )  # without, it is asked whether there is such a model
        return SimpleNamespace(
            status_code=200, raise_for_status=lambda: None, json=lambda: json.loads(said), headers={}
        )

    with patch("huggingface_hub.hf_api.get_session", lambda: SimpleNamespace(get=get)):
        return HubStore(f"hf://org/{root.name}")


def agree(root: Path, found: dict[str, dict[str, int]]) -> None:
    for name, files in found.items():
        said = (root / name).read_bytes()
        assert all(file and ".." not in file.split("/") and size >= 0 for file, size in files.items()), files
        if name == HUB:
            wanted = {str(file["rfilename"]): int(file.get("size") or 0) for file in json.loads(said)["siblings"]}
            assert files == wanted
            continue
        listed = dict(_listed(said.split(BETWEEN.encode())))
        # What stands for a folder of others is not a file; one that stands for an empty folder cannot be told from one.
        paths = {"/".join(filter(None, key.split("/"))): size for key, size in listed.items()}
        folders = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
        below = {
            path.removeprefix(f"{root.name}/"): size
            for path, size in paths.items()
            if path.startswith(f"{root.name}/") and path not in folders
        }
        alone = {root.name: listed[root.name]} if root.name in listed else {}  # the address of a file
        assert files == below or (alone and not below and files == alone), (files, listed)


def _listed(pages: list[bytes]) -> Iterator[tuple[str, int]]:
    for page in pages:
        try:
            words = ElementTree.fromstring(page)
        except ElementTree.ParseError:  # obstore reads some that are not well-formed: then by the letters of the text
            yield from _by_letters(page)
            if b"<NextContinuationToken>" not in page:
                return
            continue
        for row in words:
            said = {inner.tag.rpartition("}")[2]: inner.text or "" for inner in row}
            if row.tag.rpartition("}")[2] == "Contents":
                yield said["Key"], int(said["Size"])
        if all(row.tag.rpartition("}")[2] != "NextContinuationToken" for row in words):
            return


def _by_letters(page: bytes) -> Iterator[tuple[str, int]]:
    """The rows of a page that is not well-formed; AssertionError if it is cut off."""
    text = page.decode(errors="replace")  # obstore reads past a byte that is no letter where no name is
    assert "</ListBucketResult" in text, "a part was taken for all of it"
    for row in re.findall(r"<Contents\b[^>]*>(.*?)</Contents\s*>", text, re.DOTALL):
        said = dict(re.findall(r"<(\w+)\b[^>]*>([^<]*)</\1\s*>", row))
        yield unescape(said["Key"]), int(said["Size"])


TARGET = Target("listings", make, cases, read, agree, XML)
