"""Models at gs://, by gcsfs against the part of Google's JSON API that it uses, served here."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

import bridge
from bridge.errors import SourceError
from bridge.sources import open_source
from tests.remote.server import Quiet

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
ONE = re.compile(r"/(?:download/)?storage/v1/b/bucket/o/([^?]+)")


class Bucket(BaseHTTPRequestHandler):
    """One bucket, its objects in memory."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    sent: list[int]
    looked: list[str]

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def row(self, name: str) -> dict[str, str]:
        data = self.objects[name]
        tag = hashlib.md5(data).hexdigest()
        made = "2026-01-01T00:00:00.000Z"
        return {"kind": "storage#object", "name": name, "bucket": "bucket", "size": str(len(data)), "etag": tag,
                "timeCreated": made, "updated": made, "generation": str(int(tag[:8], 16))}  # fmt: skip

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        asked, match = parse_qs(parts.query), ONE.match(parts.path)
        if match is None:
            names = [name for name in self.objects if name.startswith(asked.get("prefix", [""])[0])]
            known = parts.path.endswith("/b/bucket/o")
            self.say({"items": [self.row(name) for name in sorted(names)]} if known else {}, 200 if known else 404)
        elif unquote(match[1]) not in self.objects:
            self.say({"error": {"code": 404, "message": "none"}}, 404)
        elif asked.get("alt") == ["media"]:
            data = self.objects[unquote(match[1])]
            if asked.get("generation", [""])[0] not in ("", self.row(unquote(match[1]))["generation"]):
                return self.say({"error": {"code": 404, "message": "no such generation"}}, 404)
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            body = data[int(span[1]) : int(span[2]) + 1] if span else data
            self.sent.append(len(body))
            self.say(body, 206 if span else 200)
        else:
            self.looked.append(unquote(match[1]))
            self.say(self.row(unquote(match[1])))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        message = message_from_bytes(f"Content-Type: {self.headers['Content-Type']}\n\n".encode() + body)
        told, _ = message.get_payload()
        name = json.loads(told.get_payload(decode=True))["name"]
        boundary = message.get_boundary().encode()  # the email package would change line ends of the second part
        content = body.split(b"--" + boundary)[2].split(b"\n\n", 1)[-1]
        if content.startswith(b"\r\n"):
            content = content[2:]
        self.objects[name] = content[:-1] if content.endswith(b"\n") else content
        self.say(self.row(name))

    def do_DELETE(self) -> None:
        match = ONE.match(urlsplit(self.path).path)
        assert match
        del self.objects[unquote(match[1])]
        self.say(b"", 204)

    def say(self, body: object, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Bucket]]:
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks by gRPC what kind of bucket it is
    from fsspec.config import conf
    from fsspec.registry import _registry
    from gcsfs.core import GCSFileSystem

    made = type("Bound", (Bucket,), {"objects": {}, "sent": [], "looked": []})
    server = Quiet(("127.0.0.1", 0), made)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setitem(conf, "gs", {"token": "anon"})
    monkeypatch.setitem(_registry, "gs", GCSFileSystem)
    GCSFileSystem.clear_instance_cache()
    yield made
    GCSFileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()


def test_a_conversion_writes_the_bytes_of_a_local_one(bucket: type[Bucket], tmp_path: Path) -> None:
    bucket.objects |= {f"models/tiny/{path.name}": path.read_bytes() for path in TINY.iterdir()}
    bridge.convert("gs://bucket/models/tiny", "hf", "fp8_pc_pt", tmp_path / "far")
    bridge.convert(TINY, "hf", "fp8_pc_pt", tmp_path / "near")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "far" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()


def test_a_plan_reads_heads_only(bucket: type[Bucket]) -> None:
    bucket.objects |= {f"m/{path.name}": path.read_bytes() for path in TINY.iterdir()}
    bridge.plan("gs://bucket/m", "hf", "int8_wo")
    assert sum(bucket.sent) < 400_000 < len(bucket.objects["m/model.safetensors"])


def test_check_and_read_are_one_request(bucket: type[Bucket]) -> None:
    bucket.objects |= {f"m/{path.name}": path.read_bytes() for path in TINY.iterdir()}
    source = open_source("gs://bucket/m")
    bucket.looked.clear()
    source.read("model.norm.weight")
    assert not bucket.looked and bucket.sent


def test_an_object_that_changes_is_an_error(bucket: type[Bucket]) -> None:
    bucket.objects |= {f"m/{path.name}": path.read_bytes() for path in TINY.iterdir()}
    source = open_source("gs://bucket/m")
    bucket.objects["m/model.safetensors"] = bytes(len(bucket.objects["m/model.safetensors"]))
    with pytest.raises(SourceError, match="changed since it was opened"):
        source.read("model.norm.weight")


def test_an_output_is_sent_whole(bucket: type[Bucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bridge.convert(TINY, "hf", "int8_wo", "gs://bucket/out/tiny", verify=False)
    bridge.convert(TINY, "hf", "int8_wo", "near", verify=False)
    near = {f"out/tiny/{path.name}": path for path in Path("near").iterdir()}
    assert bucket.objects.keys() == near.keys()
    for name in ("model.safetensors", "config.json", "bridge.json"):
        assert bucket.objects[f"out/tiny/{name}"] == near[f"out/tiny/{name}"].read_bytes()
