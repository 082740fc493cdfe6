"""Models at az://, by obstore against the part of Azure's Blob API that it uses, served here, and against Azurite.

Azurite is Microsoft's own stand-in for Azure's store: `npm install -g azurite`, or its program's path in `AZURITE`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

import bridge
from bridge.core.errors import SourceError
from bridge.core.remote.objects import Bucket
from bridge.core.remote.upload_note import NOTE
from bridge.sources.opening import open_source
from tests.core.remote.azure import ACCOUNT, KEY, serving_azure

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")


def make_container(url: str, name: str) -> None:
    """As no part of bridge does: signed by hand."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    text = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:2021-12-02\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": date, "x-ms-version": "2021-12-02", "Content-Length": "0"}
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signed}"
    asked = urllib.request.Request(f"{url}/{name}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(asked).close()


@contextmanager
def running_azurite(directory: Path) -> Iterator[str]:
    assert AZURITE
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", f"{port}"]
    running = subprocess.Popen([AZURITE, *words], cwd=directory)
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        make_container(f"http://127.0.0.1:{port}/{ACCOUNT}", "container")
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        running.kill()  # a SIGTERM waits for connections that are kept
        running.wait()


@pytest.fixture(scope="module", params=["served", "azurite"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "served":
        with serving_azure() as (url, _):
            yield url
    elif AZURITE:
        with running_azurite(tmp_path_factory.mktemp("azurite")) as url:
            yield url
    else:
        pytest.skip("Azurite is not installed: npm install -g azurite")


def connect(monkeypatch: pytest.MonkeyPatch, url: str, **credentials: str) -> None:
    parts = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, **credentials, "BlobEndpoint": url}
    text = "".join(f"{name}={value};" for name, value in parts.items())
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)


@pytest.fixture
def az(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty folder, which is also `az://container/<name>`."""
    monkeypatch.chdir(tmp_path)
    connect(monkeypatch, server, AccountKey=KEY)
    folder = Bucket(f"az://container/{tmp_path.name}")
    assert not folder.list()
    return folder


@pytest.mark.slow
def test_a_model_is_read_and_written_there(az: Bucket, tmp_path: Path) -> None:
    for path in TINY.iterdir():
        az.put(f"src/{path.name}", path)
    place = f"az://container/{tmp_path.name}"
    assert bridge.convert(f"{place}/src", "hf", "fp8_pc_pt", f"{place}/out").passed
    bridge.convert(TINY, "hf", "fp8_pc_pt", "near")
    near = {path.relative_to("near").as_posix() for path in Path("near").rglob("*") if path.is_file()}
    assert {name.removeprefix("out/") for name in az.list() if name.startswith("out/")} == near
    assert bridge.verify(f"{place}/out", TINY).passed
    assert [path.name for path in tmp_path.iterdir()] == ["near"]


@pytest.mark.slow
def test_a_blob_in_parts_is_the_file_and_its_tag_that_of_the_listing(az: Bucket, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(40 << 20))
    az.put("big", tmp_path / "big")
    assert az.list()["big"] == az.stat("big") == az.read("big", 0, 10)[0]
    pieces = [az.read("big", begin, 40 << 20)[1] for begin in range(0, 40 << 20, 8 << 20)]
    assert b"".join(map(bytes, pieces)) == (tmp_path / "big").read_bytes()


def test_an_upload_that_was_cut_off_is_gone_on_with(
    az: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, sent = f"az://container/{tmp_path.name}/out", Bucket.put, list[str]()

    def put(self: Bucket, name: str, content: bytes | Path) -> None:
        if isinstance(content, Path):
            sent.append(name)
            if sent == [*sent[:-1], "config.json"] and sent.count("config.json") == 1:
                raise KeyboardInterrupt
        real(self, name, content)

    monkeypatch.setattr(Bucket, "put", put)
    with pytest.raises(KeyboardInterrupt):
        bridge.convert(TINY, "hf", "int8_wo", out, verify=False)
    assert f"out/{NOTE}" in az.list() and "out/config.json" not in az.list()
    before = len(sent)
    bridge.convert(TINY, "hf", "int8_wo", out, verify=False)
    assert sent[before:] == ["config.json", "bridge.json"] and f"out/{NOTE}" not in az.list()


def test_what_goes_wrong_is_told(az: Bucket, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in TINY.iterdir():
        az.put(path.name, path)
    place = f"az://container/{tmp_path.name}"
    source = open_source(place)
    az.put("model.safetensors", bytes(az.stat("model.safetensors").nbytes))
    with pytest.raises(SourceError, match="changed since it was opened"):
        source.read("model.norm.weight")
    with pytest.raises(SourceError, match=f"{place}/none: nothing is there"):
        open_source(f"{place}/none")
    with pytest.raises(SourceError, match="az://no-such/m: not there; check the address"):
        open_source("az://no-such/m")
    connect(monkeypatch, server, AccountKey=base64.b64encode(b"veiled").decode())
    assert "veiled" not in (refused := refusal(place)) and "dmVpbGVk" not in refused


def refusal(place: str) -> str:
    with pytest.raises(SourceError, match=r"access refused \(403 Forbidden\); check the credentials \(AZURE_") as error:
        open_source(place)
    return str(error.value)


def test_every_request_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "big").write_bytes(os.urandom(17 << 20))
    with serving_azure() as (url, served):
        connect(monkeypatch, url, AccountKey=KEY)
        az = Bucket("az://container/m")
        az.put("a b", b"1")
        az.put("big", tmp_path / "big")
        assert az.list().keys() == {"a b", "big"} and az.stat("a b").nbytes == 1
        assert bytes(az.read("a b", 0, 1)[1]) == b"1"
        az.remove("a b")
        assert {call for call, _ in served.asked} >= {
            "GET list", "HEAD", "GET", "PUT", "PUT block", "PUT blocklist", "POST batch", "DELETE",
        }  # fmt: skip
        assert served.blobs.keys() == {"m/big"} and not served.blocks
        assert all(given.startswith(f"SharedKey {ACCOUNT}:") and KEY not in given for _, given in served.asked)


def test_a_shared_access_signature_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_azure() as (url, served):
        served.shared, served.blobs = "sv=2021-12-02&sp=rl&sig=veiled%2Bsecret", {"m/none": b"1"}
        connect(monkeypatch, url, SharedAccessSignature=served.shared)
        az = Bucket("az://container/m")
        assert az.list().keys() == {"none"} and bytes(az.read("none", 0, 1)[1]) == b"1"
        assert {given for _, given in served.asked} == {"veiled+secret"}
        served.shared = "sig=another"
        with pytest.raises(PermissionError) as caught:
            az.read("none", 0, 1)
        for text in (str(caught.value), refusal("az://container/m")):
            assert not any(word in text for word in ("veiled", "secret", "sig="))


def test_a_listing_comes_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_azure() as (url, served):
        served.blobs |= {f"m/{number:02}": bytes(number) for number in range(12)}
        connect(monkeypatch, url, AccountKey=KEY)
        assert [look.nbytes for look in Bucket("az://container/m").list().values()] == [*range(12)]
        assert [call for call, _ in served.asked] == ["GET list"] * 3
