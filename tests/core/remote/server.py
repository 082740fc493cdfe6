"""A directory over HTTP in this process, with what goes wrong with servers: counts what it was asked for and sent.

And a server of S3.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

S3 = {"AWS_ACCESS_KEY_ID": "akey", "AWS_SECRET_ACCESS_KEY": "asecret", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass
class Manners:
    """How the server behaves, and what it saw."""

    root: Path
    ranges: bool = True
    drop_after: int = 0  # bytes of a body, then the connection is gone
    drops: int = 1 << 30  # so often at most
    drop_at_least: int = 0  # only bodies longer than this
    fail: list[int] = field(default_factory=list)  # a status for each of the next requests of weights
    status: dict[str, int] = field(default_factory=dict)  # by name, always
    stall: float = 0.0  # seconds before a body
    stall_at: int = 0  # or after so many bytes of it
    drip: float = 0.0  # seconds before each byte of a body
    deaf: int = 0  # says nothing, ever, to who asks for bytes beyond this one
    deafened: threading.Event = field(default_factory=threading.Event)
    keep: float | None = None  # seconds of silence, then the connection is closed
    answers_all: bytes = b""  # to any name that is not there
    cut_404: bool = False  # the body that says so is shorter than announced
    headers_said: dict[str, str] = field(default_factory=dict)  # by the next answers, in place of its own
    tag: str = ""  # after every ETag
    password: str = ""  # what Authorization must be
    query: str = ""  # what the address must end in
    proxied: str = ""  # what Proxy-Authorization must be; the server is a proxy for any host then
    onward: str = ""  # the server that requests are sent on to
    sent: dict[str, int] = field(default_factory=dict)
    ranges_asked: list[tuple[str, int, int]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    connections: int = 0

    @property
    def total(self) -> int:
        return sum(self.sent.values())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    manners: Manners

    def setup(self) -> None:
        self.timeout = self.manners.keep
        super().setup()
        with self.manners.lock:
            self.manners.connections += 1

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        manners, parts = self.manners, urlsplit(self.path)
        name = unquote(parts.path).lstrip("/")
        path = manners.root / name
        with manners.lock:
            manners.headers.append(dict(self.headers))
            status = manners.status.get(name, 0)
            if not status and path.suffix in (".safetensors", ".bin") and manners.fail:
                status = manners.fail.pop(0)
        if manners.password and self.headers.get("Authorization") != manners.password:
            status = 401
        if manners.proxied and self.headers.get("Proxy-Authorization") != manners.proxied:
            status = 407
        if manners.query and parts.query != manners.query:
            status = 403
        if manners.onward and not status:
            self.answer(302, b"", {"Location": f"{manners.onward}{self.path}"})
        elif status:
            self.answer(status, b"no", {})
        elif manners.answers_all and not path.is_file():
            said = {"Content-Range": f"bytes 0-1/{len(manners.answers_all)}"}
            self.answer(206 if manners.ranges else 200, manners.answers_all, said)
        elif not path.is_file():
            self.answer(404, b"none", {"Content-Length": "9"} if manners.cut_404 else {})
            self.close_connection = self.close_connection or manners.cut_404
        else:
            self.send_file(name, path)

    def send_file(self, name: str, path: Path) -> None:
        manners, data = self.manners, path.read_bytes()
        headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}{manners.tag}"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not manners.ranges:
            return self.answer(200, data, headers, name)
        if 0 < manners.deaf < int(asked[2]):
            manners.deafened.set()
            threading.Event().wait()
        begin, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
        if begin >= len(data):
            return self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        with manners.lock:
            manners.ranges_asked.append((name, begin, end))
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        return self.answer(206, data[begin:end], headers, name)

    def answer(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        manners = self.manners
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers, **manners.headers_said}.items():
            self.send_header(key, value)
        self.end_headers()
        if manners.stall and name.endswith(".safetensors"):
            self.wfile.write(body[: manners.stall_at])
            threading.Event().wait(manners.stall)
            body = body[manners.stall_at :]
        cut = len(body)
        with manners.lock:
            if manners.drop_after and manners.drops and cut > max(manners.drop_after, manners.drop_at_least):
                cut, manners.drops = max(manners.drop_after, 0), manners.drops - 1
            if name:
                manners.sent[name] = manners.sent.get(name, 0) + cut
        if manners.drip and name.endswith(".safetensors"):
            for at in range(cut):
                threading.Event().wait(manners.drip)
                self.wfile.write(body[at : at + 1])
            return
        self.wfile.write(body[:cut])
        if cut < len(body):
            self.close_connection = True


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *args: object) -> None:
        """A client that closed a connection is no news."""


@contextmanager
def serving(root: Path, **manners: object) -> Iterator[tuple[str, Manners]]:
    """The address of `root`, and how it is served, which may be changed meanwhile."""
    made = Manners(root, **manners)  # type: ignore[arg-type]
    server = Quiet(("127.0.0.1", 0), type("Bound", (Handler,), {"manners": made}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving_s3() -> Iterator[str]:
    """The address of a server that knows no bucket yet; it is asked with `S3` in the environment."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
