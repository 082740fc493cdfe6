"""Models by hf:// from a hub in this process: read by range from where it sends on to, nothing in its cache."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from huggingface_hub import HfFileSystem, constants

import bridge
from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from tests.core.remote.server import Manners, Quiet, serving

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """What is asked of the hub: a model's files at a commit, and where each is stored."""

    protocol_version = "HTTP/1.1"
    store: str
    sha = SHA
    changed: tuple[str, ...] = ()  # files that another commit holds with other content of the same size
    asked: list[tuple[str, str]]

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.asked.append((path, self.headers.get("Authorization", "")))
        if path.startswith("/api/models/org/gated"):
            self.say(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"})
        elif path.startswith("/api/models/org/tiny"):
            files = [
                {"rfilename": file.name, "size": file.stat().st_size, **self.stored(file)} for file in TINY.iterdir()
            ]
            self.say(200, json.dumps({"id": "org/tiny", "sha": self.sha, "siblings": files, "tags": []}).encode(), {})
        elif path.startswith(f"/org/tiny/resolve/{self.sha}/"):
            self.say(302, b"", {"Location": f"{self.store}/{path.rpartition('/')[2]}?signature=veiled"})
        else:
            self.say(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    @classmethod
    def stored(cls, file: Path) -> dict[str, object]:
        """What the hub says of a file's content, of weights otherwise than of small files."""
        content = hashlib.sha256(file.read_bytes() + cls.sha.encode() * (file.name in cls.changed)).hexdigest()
        if file.suffix != ".safetensors":
            return {"blobId": content}
        return {"blobId": "of a pointer", "lfs": {"sha256": content, "size": file.stat().st_size, "pointerSize": 134}}

    def say(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hub(store: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    asked: list[tuple[str, str]] = []
    server = Quiet(("127.0.0.1", 0), type("Bound", (Hub,), {"store": store, "asked": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[list[tuple[str, str]], Manners]]:
    """What the hub was asked, and the store that it sends on to."""
    with serving(TINY, query="signature=veiled") as (store, manners), hub(store) as (url, asked):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_atoken")
        HfFileSystem.clear_instance_cache()
        yield asked, manners
        HfFileSystem.clear_instance_cache()


@pytest.mark.slow
def test_a_conversion_writes_the_bytes_of_a_local_one(
    world: tuple[list[tuple[str, str]], Manners], tmp_path: Path
) -> None:
    report = bridge.convert("hf://org/tiny", "hf", "fp8_pc_pt", tmp_path / "far")
    bridge.convert(TINY, "hf", "fp8_pc_pt", tmp_path / "near")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "far" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()
    assert report.passed and not (tmp_path / "cache").exists()


def test_a_revision_is_read_at_its_commit_by_range(world: tuple[list[tuple[str, str]], Manners]) -> None:
    asked, manners = world
    source, near = open_source("hf://org/tiny@v1"), open_source(TINY)
    assert source.where == "hf://org/tiny@v1" and source.name == "tiny"
    assert np.array_equal(source.read_rows("lm_head.weight", 3, 9), near.read_rows("lm_head.weight", 3, 9))
    assert any(path.endswith("/revision/v1") for path, _ in asked)
    assert manners.ranges_asked


def test_the_hub_learns_the_token_and_the_store_does_not(world: tuple[list[tuple[str, str]], Manners]) -> None:
    asked, manners = world
    open_source("hf://org/tiny").read("model.norm.weight")
    of_the_model = [token for path, token in asked if "/org/tiny" in path]  # its library asks for more, once a process
    assert of_the_model and set(of_the_model) == {"Bearer hf_atoken"}
    assert manners.headers and not any("Authorization" in headers for headers in manners.headers)


def test_the_hub_is_asked_where_a_file_is_stored_once(world: tuple[list[tuple[str, str]], Manners]) -> None:
    asked, _ = world
    source = open_source("hf://org/tiny")
    for name in source.specs:
        source.read(name)
    assert sum(path.endswith("/model.safetensors") for path, _ in asked) == 1


def test_an_address_that_ran_out_is_asked_for_anew(world: tuple[list[tuple[str, str]], Manners]) -> None:
    asked, manners = world
    source = open_source("hf://org/tiny")
    source.read_rows("model.norm.weight", 0, 1)
    source.root.tree.weights._blocks.clear()  # type: ignore[attr-defined]
    manners.fail = [403]
    source.read_rows("model.norm.weight", 0, 1)
    assert sum(path.endswith("/model.safetensors") for path, _ in asked) == 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("hf://org/none", "hf://org/none: the hub has no (public) model of this name; check spelling"),
        ("hf://org/gated", "hf://org/gated: the hub asks for access rights; request access to the model on the hub"),
        ("hf://datasets/org/tiny", "hf://datasets/org/tiny: "),
    ],
)
def test_what_the_hub_refuses_is_told(model: str, said: str, world: tuple[list[tuple[str, str]], Manners]) -> None:
    with pytest.raises(SourceError) as caught:
        open_source(model)
    assert str(caught.value).startswith(said) and "atoken" not in str(caught.value)


@pytest.mark.parametrize(("changed", "same"), [("model.safetensors", False), ("README.md", True)])
def test_a_branch_that_moved_on_is_another_model_where_its_weights_changed(
    changed: str, same: bool, world: tuple[list[tuple[str, str]], Manners], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run is gone on with under an equal fingerprint."""
    first = open_source("hf://org/tiny").fingerprint
    monkeypatch.setattr(Hub, "sha", SHA[::-1])
    monkeypatch.setattr(Hub, "changed", (changed,))
    HfFileSystem.clear_instance_cache()
    assert (open_source("hf://org/tiny").fingerprint == first) is same
