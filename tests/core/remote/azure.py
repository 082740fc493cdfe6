"""The part of Azure's Blob REST API that obstore uses, served in this process: one container, its blobs in memory.

It checks every signature as Microsoft's reference defines it, and keeps what it was asked with.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.core.remote.server import Quiet

ACCOUNT = "devstoreaccount1"  # Azurite's, with a key that everybody knows
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PAGE = 5  # blobs of a page of a listing: Azure sends 5000
SIGNED = (
    "Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date",
    "If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range",
)  # fmt: skip


def signed(verb: str, path: str, query: dict[str, str], headers: Message) -> str:
    """As "Authorize with Shared Key" of the REST API's reference has it."""
    plain = {name: headers.get(name, "") for name in SIGNED}
    if plain["Content-Length"] == "0":
        plain["Content-Length"] = ""
    named = sorted((name.lower(), value) for name, value in headers.items() if name.lower().startswith("x-ms-"))
    lines = [verb, *plain.values(), *(f"{name}:{value}" for name, value in named)]
    lines += [f"/{ACCOUNT}{path}", *(f"{key}:{query[key]}" for key in sorted(query))]
    digest = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256)
    return f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"


class Azure(BaseHTTPRequestHandler):
    """The container is called `container`."""

    protocol_version = "HTTP/1.1"
    blobs: dict[str, bytes]
    blocks: dict[tuple[str, str], bytes]  # of blobs that are not committed, by blob and id
    asked: list[tuple[str, str]]  # verb with `comp`, and the credential that came with it
    shared: str  # the query of a shared access signature; "" if requests are signed with the key

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def take(self) -> tuple[str, dict[str, str], bytes] | None:
        """Blob, query and body of a request; None after a refusal."""
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        shared = self.shared and query.get("sig") == parse_qs(self.shared)["sig"][0]
        given = self.headers.get("Authorization", "")
        self.asked.append((f"{self.command} {query.get('comp', '')}".strip(), query.get("sig", "") or given))
        _, account, container, *below = parts.path.split("/", 3)
        if not shared and given != signed(self.command, parts.path, query, self.headers):
            self.say(403, b"<Error><Code>AuthenticationFailed</Code></Error>")
        elif (account, container) != (ACCOUNT, "container"):
            self.say(404, b"<Error><Code>ContainerNotFound</Code></Error>")
        else:
            return unquote("".join(below)), query, body
        return None

    def do_GET(self) -> None:
        if (got := self.take()) is None:
            return
        name, query, _ = got
        if query.get("comp") == "list":
            self.list(query.get("prefix", ""), query.get("marker", ""))
        elif name not in self.blobs:
            self.say(404, b"<Error><Code>BlobNotFound</Code></Error>")
        else:
            data, span = self.blobs[name], re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            begin, end = (int(span[1]), min(int(span[2]) + 1, len(data))) if span else (0, len(data))
            more = {"ETag": self.tag(name), "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
            self.say(206 if span else 200, data[begin:end], more)

    def list(self, prefix: str, marker: str) -> None:
        names = [name for name in sorted(self.blobs) if name.startswith(prefix) and name >= marker]
        rows = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified>"
            f"<Etag>{escape(self.tag(name))}</Etag><Content-Length>{len(self.blobs[name])}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for name in names[:PAGE]
        )
        after = f"<NextMarker>{escape(names[PAGE])}</NextMarker>" if names[PAGE:] else "<NextMarker />"
        self.say(200, f"<EnumerationResults><Blobs>{rows}</Blobs>{after}</EnumerationResults>".encode())

    def do_HEAD(self) -> None:
        if got := self.take():
            found = got[0] in self.blobs
            more = {"ETag": self.tag(got[0]), "Content-Length": f"{len(self.blobs[got[0]])}"} if found else {}
            self.say(200 if found else 404, b"", more)

    def do_PUT(self) -> None:
        if (got := self.take()) is None:
            return
        name, query, body = got
        if query.get("comp") == "block":
            self.blocks[name, query["blockid"]] = body
            return self.say(201, b"")
        if query.get("comp") == "blocklist":
            ids = re.findall(r"<(?:Uncommitted|Latest)>([^<]+)<", body.decode())
            body = b"".join(self.blocks.pop((name, one)) for one in ids)
        else:
            assert self.headers["x-ms-blob-type"] == "BlockBlob"
        self.blobs[name] = body
        return self.say(201, b"", {"ETag": self.tag(name)})

    def do_POST(self) -> None:
        """A batch of deletions, as MIME parts: answered in the same way."""
        if (got := self.take()) is None:
            return
        boundary = f"--{self.headers['Content-Type'].partition('boundary=')[2]}".encode()
        answers = []
        for at, part in enumerate(got[2].split(boundary)[1:-1]):
            command, _, lines = part.strip().partition(b"\r\n\r\n")[2].partition(b"\r\n")
            verb, path, _ = command.decode().split(" ")
            assert verb == "DELETE"
            headers = message_from_bytes(lines)
            self.asked.append(("DELETE", headers["Authorization"]))
            if headers["Authorization"] != signed(verb, path, {}, headers):
                status = "403 Forbidden"
            else:
                name = unquote(path.split("/", 3)[3])
                status = "404 Not Found" if self.blobs.pop(name, None) is None else "202 Accepted"
            answers.append(f"Content-Type: application/http\r\nContent-ID: {at}\r\n\r\nHTTP/1.1 {status}\r\n\r\n")
        text = "".join(f"--batch\r\n{one}\r\n" for one in answers) + "--batch--\r\n"
        self.say(202, text.encode(), {"Content-Type": "multipart/mixed; boundary=batch"})

    def tag(self, name: str) -> str:
        return f'"0x{hashlib.md5(self.blobs[name]).hexdigest()[:15].upper()}"'

    def say(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        more = {"Content-Length": str(len(data)), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **(headers or {})}
        for key, value in more.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving_azure() -> Iterator[tuple[str, type[Azure]]]:
    """The address of the account, and what the server keeps."""
    made = type("Bound", (Azure,), {"blobs": {}, "blocks": {}, "asked": [], "shared": ""})
    server = Quiet(("127.0.0.1", 0), made)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{ACCOUNT}", made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
