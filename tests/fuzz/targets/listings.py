"""What stores and the hub list, through s3fs with botocore's parser, gcsfs and huggingface_hub, against ElementTree
and `json`.

Correct is: the files are all those of the listing below the directory, with their sizes, of however many pages it has;
else a clean error. Neither a name that leads out of the directory, nor a size that no file has, is ever handed on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import botocore.parsers
import botocore.session
import gcsfs
import s3fs
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.remote.hub import HubStore
from bridge.remote.objects import ObjectStore
from bridge.remote.place import Store, Tree
from tests.attack.case import Case, Target
from tests.attack.mutate import encoded, jsons, texts

XML, JSON, HUB = "s3.xml", "gs.json", "hf.json"
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


@cache
def _shape() -> Any:
    return botocore.session.get_session().get_service_model("s3").operation_model("ListObjectsV2").output_shape


class _S3(s3fs.S3FileSystem):  # type: ignore[misc]
    """s3fs, answered by pages: the first, or, of who has a token, the one after the last that was asked for."""

    def say(self, pages: list[bytes]) -> None:
        self.pages, self.at = pages, 0

    async def _call_s3(self, method: str, *given: Any, **named: Any) -> Any:
        self.at = self.at + 1 if "ContinuationToken" in named else 0
        if method != "list_objects_v2" or self.at == len(self.pages):
            raise FileNotFoundError(method)
        answer = {"status_code": 200, "headers": {}, "body": self.pages[self.at]}
        return botocore.parsers.create_parser("rest-xml").parse(answer, _shape())


class _Gcs(gcsfs.GCSFileSystem):  # type: ignore[misc]
    """gcsfs, answered likewise."""

    def say(self, pages: list[bytes]) -> None:
        self.pages, self.at = pages, 0

    async def _call(self, method: str, path: str, *given: Any, **named: Any) -> Any:
        self.at = self.at + 1 if named.get("pageToken") is not None else 0
        if self.at == len(self.pages):
            raise FileNotFoundError(path)
        return json.loads(self.pages[self.at])

    async def _is_bucket_hns_enabled(self, bucket: str) -> bool:
        return False


@cache
def _stores() -> dict[str, Any]:
    return {
        XML: _S3(anon=True, use_listings_cache=False, skip_instance_cache=True),
        JSON: _Gcs(token="anon", use_listings_cache=False, skip_instance_cache=True),
    }


def make(root: Path) -> None:
    rows = [(f"{root.name}/{name}", at * 1000) for at, name in enumerate(NAMES)]
    pages = [rows[:2], rows[2:3], rows[3:]]
    (root / XML).write_bytes(_xml(pages))
    (root / JSON).write_bytes(_pages(_json(pages)))
    (root / HUB).write_text(json.dumps(_hub([(name, at * 1000) for at, name in enumerate(NAMES[:-1])])))


def _pages(pages: Iterable[Any]) -> bytes:
    return BETWEEN.join(map(json.dumps, pages)).encode()


def _xml(pages: list[Rows]) -> bytes:
    """A listing of S3."""
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


def _json(pages: list[Rows]) -> list[dict[str, Any]]:
    """A listing of Google's store."""
    found = []
    for number, rows in enumerate(pages, 1):
        items = [
            {
                "name": key,
                "bucket": "bucket",
                "size": str(size),
                "generation": "1",
                "updated": DATE,
                "timeCreated": DATE,
            }
            for key, size in rows
        ]
        more = {"nextPageToken": f"{number}"} if number < len(pages) else {}
        found.append({"kind": "storage#objects", "items": items} | more)
    return found


def _hub(rows: Rows) -> dict[str, Any]:
    """What the hub says of a model."""
    files = [{"rfilename": name, "size": size, "blobId": f"{size}"} for name, size in rows]
    for file in files[1:2]:
        file["lfs"] = {"size": file["size"], "sha256": "a" * 64, "pointerSize": 134}
    return {"id": "org/model", "sha": "b" * 40, "siblings": files, "tags": []}


def cases(root: Path) -> SearchStrategy[Case]:
    xml = encoded(texts((root / XML).read_text(), WORDS))
    hub = jsons(json.loads((root / HUB).read_text()))
    changed = st.one_of(xml.map(_only(XML)), _one_changed(root).map(_only(JSON)), hub.map(_only(HUB)))
    keys = st.one_of(st.sampled_from(KEYS).map(lambda key: root.name + key), st.just(f"else/{root.name}/x"))
    pages = st.lists(st.lists(st.tuples(keys, st.integers(0, 1 << 62)), max_size=5), min_size=1, max_size=4)
    sound = st.one_of(
        pages.map(_xml).map(_only(XML)),
        pages.map(_json).map(_pages).map(_only(JSON)),
        pages.map(lambda pages: json.dumps(_hub(_below(root, pages))).encode()).map(_only(HUB)),
    )
    return st.one_of(changed, changed, sound)


def _below(root: Path, pages: list[Rows]) -> Rows:
    return [(key.removeprefix(f"{root.name}/"), size) for rows in pages for key, size in rows]


@st.composite
def _one_changed(draw: st.DrawFn, root: Path) -> bytes:
    """Google's listing with one of its pages changed."""
    said = (root / JSON).read_bytes().split(BETWEEN.encode())
    at = draw(st.integers(0, len(said) - 1))
    said[at] = draw(jsons(json.loads(said[at])))
    return BETWEEN.encode().join(said)


def _only(name: str) -> Callable[[bytes], Case]:
    """The case in which one of them answers."""
    return lambda content: dict.fromkeys((XML, JSON, HUB)) | {name: content}


def read(root: Path) -> dict[str, dict[str, int]]:
    found = {}
    for name in (XML, JSON, HUB):
        if (root / name).exists():
            tree = Tree((_of_the_hub if name == HUB else _of_a_bucket)(root, name))
            found[name] = {file: look.nbytes for file, look in tree.store.files.items()}
    return found


def _of_a_bucket(root: Path, name: str) -> Store:
    store = _stores()[name]
    store.say((root / name).read_bytes().split(BETWEEN.encode()))
    with patch("bridge.remote.objects.file_system", lambda url: (store, f"bucket/{root.name}")):
        return ObjectStore(f"{name[:2]}://bucket/{root.name}")


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
        listed = dict((_of_s3 if name == XML else _of_gcs)(said.split(BETWEEN.encode())))
        below = {
            key.removeprefix(f"{root.name}/"): size for key, size in listed.items() if key.startswith(f"{root.name}/")
        }
        below = {key: size for key, size in below.items() if not (key.endswith("/") or not key)}
        alone = {root.name: listed[root.name]} if root.name in listed else {}  # the address of a file
        assert files == below or (alone and not below and files == alone), (files, listed)


def _of_s3(pages: list[bytes]) -> Iterator[tuple[str, int]]:
    for page in pages:
        words = ElementTree.fromstring(page)
        for row in words:
            said = {inner.tag.rpartition("}")[2]: inner.text or "" for inner in row}
            if row.tag.rpartition("}")[2] == "Contents":
                yield said["Key"], int(said["Size"])
        more = [row.text for row in words if row.tag.rpartition("}")[2] == "IsTruncated"]
        if more != ["true"]:  # botocore's: what is said twice is not said
            return


def _of_gcs(pages: list[bytes]) -> Iterator[tuple[str, int]]:
    for page in map(json.loads, pages):
        for row in page.get("items", []):
            yield str(row["name"]), int(row.get("size", 0))
        if page.get("nextPageToken") is None:
            return


TARGET = Target("listings", make, cases, read, agree, XML)
