"""Models at gs://, by obstore against the part of Google's XML API that it uses, served here."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

import bridge
from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from tests.core.remote.server import Quiet

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"


class Bucket(BaseHTTPRequestHandler):
    """One bucket, its objects in memory."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    sent: list[int]
    looked: list[str]

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket").strip("/")

    def do_GET(self) -> None:
        name = self.name()
        if "list-type" in (asked := parse_qs(urlsplit(self.path).query)):
            names = [name for name in self.objects if name.startswith(asked.get("prefix", [""])[0])]
            known = urlsplit(self.path).path.strip("/") == "bucket"
            rows = "".join(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size><ETag>{self.tag(name)}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for name in sorted(names)
            )
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
            self.say(text.encode() if known else b"", {}, 200 if known else 404)
        elif name not in self.objects:
            self.say(b"", {}, 404)
        else:
            data = self.objects[name]
            first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            begin, end = (int(first), min(int(last) + 1, len(data))) if last else (0, len(data))
            self.sent.append(end - begin)
            said = {"ETag": self.tag(name), "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
            self.say(data[begin:end], said, 206 if last else 200)

    def do_HEAD(self) -> None:
        self.looked.append(name := self.name())
        if name in self.objects:
            self.say(b"", {"ETag": self.tag(name), "Content-Length": f"{len(self.objects[name])}"})
        else:
            self.say(b"", {}, 404)

    def do_PUT(self) -> None:
        self.objects[name := self.name()] = self.rfile.read(int(self.headers["Content-Length"]))
        self.say(b"", {"ETag": self.tag(name)})

    def do_DELETE(self) -> None:
        del self.objects[self.name()]
        self.say(b"", {}, 204)

    def tag(self, name: str) -> str:
        return f'"{hashlib.md5(self.objects[name]).hexdigest()}"'

    def say(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        more = {"Content-Length": str(len(data)), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **headers}
        for key, value in more.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Bucket]]:
    made = type("Bound", (Bucket,), {"objects": {}, "sent": [], "looked": []})
    server = Quiet(("127.0.0.1", 0), made)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    yield made
    server.shutdown()
    server.server_close()


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_output_is_sent_whole(bucket: type[Bucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bridge.convert(TINY, "hf", "int8_wo", "gs://bucket/out/tiny", verify=False)
    bridge.convert(TINY, "hf", "int8_wo", "near", verify=False)
    near = {f"out/tiny/{path.name}": path for path in Path("near").iterdir()}
    assert bucket.objects.keys() == near.keys()
    for name in ("model.safetensors", "config.json", "bridge.json"):
        assert bucket.objects[f"out/tiny/{name}"] == near[f"out/tiny/{name}"].read_bytes()
