"""What servers answer to requests for byte ranges, and where they send on to, through `http.client` but no network.

Correct is: every byte that was read is the byte of the file at that place, unless the server sent others in its place,
which nobody can know; else a clean error. Either after so many requests and so much waiting as the client allows
itself, and the user's password told to no other server.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.remote.client import MAX_FAILURES, MAX_PAUSE
from bridge.core.remote.http import HttpStore
from bridge.core.remote.path import RemotePath, RemoteTree
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import encoded, pick, texts
from tests.fuzz.wire import client

FILE = "answers.txt"
BETWEEN = "\n----\n"  # the n-th answer for a name is the n-th of the file, after the last one that again
RANGE = (
    "HTTP/1.1 206 Partial Content\nServer: any\nContent-Range: bytes {begin}-{last}/{total}\n"
    'Content-Length: {length}\nETag: "{tag}"\nConnection: keep-alive\n\n{body}'
)
WHOLE = 'HTTP/1.1 200 OK\nContent-Length: {total}\nETag: "{tag}"\n\n{whole}'
CHUNKED = (
    "HTTP/1.1 206 Partial Content\nContent-Range: bytes {begin}-{last}/{total}\nTransfer-Encoding: chunked\n\n{chunks}"
)
SENT_ON = "HTTP/1.1 302 Found\nLocation: /m/{name}?more\nContent-Length: 0\n\n"
ENDS = "HTTP/1.0 206 Partial Content\nContent-Range: bytes {begin}-{last}/{total}\n\n{body}{end}"
BUSY = "HTTP/1.1 503 Slow Down\nRetry-After: 3\nContent-Length: 2\n\nno"
NOTHING = "HTTP/1.1 416 Range Not Satisfiable\nContent-Range: bytes */{total}\nContent-Length: 0\n\n"
ANSWERS = (RANGE, WHOLE, CHUNKED, SENT_ON, ENDS, BUSY, NOTHING)
PLACES = (
    "//other/{name}", "http://a..b/", "http://" + "a" * 70 + "/x", "http://[::1", "https://h/x", "ftp://h/x", "/é ü",
    "http://h:99999/", "http://h:0/", "file:///etc/passwd", "http://ü/", "\\\\x", "http://user:secret@h/x", "?" * 3000,
)  # fmt: skip
WORDS = (
    *PLACES, "{begin}", "{last}", "{total}", "{length}", "{body}", "{chunks}", "{end}", "{tag}", "200", "206", "416",
    "302", "307", "401", "403", "404", "407", "100", "1xx", "HTTP/1.1", "HTTP/9", "bytes", "items", "chunked", "gzip",
    "close", "Content-Length", "Content-Range", "Transfer-Encoding", "Content-Encoding", "Location", "ETag",
    "Retry-After", "Connection", "Last-Modified", "identity", "multipart/byteranges", "\r", "\n\n", ":", "-", "/", "*",
    *(line + "\n" for answer in ANSWERS for line in answer.splitlines() if ":" in line),
    "HTTP/1.1 100 Continue\n\n", "0\n\n", "-5\n", "1_0\n", "ffffffffffffffff\n",
)  # fmt: skip
CONTENTS = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}).encode(),
    "a.safetensors": bytes(range(256)) * 300,  # more than the first request brings
    "b.safetensors": b"b" * 500 + b"end",
    "README.md": b"",
    "bridge.json": b'{"file": "a.safetensors", "outputs": [{"file": "../../x"}, {"file": "c.safetensors"}]}',
}
STEP = 70_000  # bytes that a reader of weights asks for at once


@dataclass
class Server:
    """What a server says, and how often it was asked."""

    answers: list[bytes]
    asked: dict[str, int] = field(default_factory=dict)
    lied: bool = False  # sent another body than its head says
    secrets: list[str] = field(default_factory=list)

    def __call__(self, request: bytes) -> tuple[bytes, bool]:
        target = request.split(b" ", 2)[1].decode("latin-1")
        name = unquote(urlsplit(target).path).rpartition("/")[2]
        at = self.asked[name] = self.asked.get(name, -1) + 1
        host = re.search(rb"\r\nHost: (.*?)\r\n", request)
        if b"\r\nAuthorization: " in request and host and host[1] != b"server":
            self.secrets.append(host[1].decode("latin-1"))
        if name not in CONTENTS:
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone", False
        span = re.search(rb"\r\nRange: bytes=(\d+)-(\d+)\r\n", request)
        assert span, request[:500]
        answer = self.answers[min(at, len(self.answers) - 1)]
        said, true, ends = _filled(answer, name, int(span[1]), int(span[2]))
        self.lied |= not true
        return said, ends


@dataclass(frozen=True)
class Read:
    """What was read of each file, and what was asked for it."""

    contents: dict[str, bytes]
    server: Server
    seconds: float


def _filled(answer: bytes, name: str, begin: int, last: int) -> tuple[bytes, bool, bool]:
    """An answer for a range, whether its body is what its head says, and whether the connection ends after it."""
    whole = CONTENTS[name]
    last = min(last, len(whole) - 1)
    body = whole[begin : last + 1]
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part) + b"0\r\n\r\n"
    head, between, rest = answer.partition(b"\n\n")
    filled = head.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") + between.replace(b"\n", b"\r\n") + rest
    words = {
        "begin": b"%d" % begin, "last": b"%d" % last, "total": b"%d" % len(whole), "length": b"%d" % len(body),
        "tag": sha256(whole).hexdigest()[:8].encode(), "name": name.encode(), "body": body, "whole": whole,
        "chunks": chunks,
    }  # fmt: skip
    known = b"|".join(word.encode() for word in words)
    ends = b"{end}" in filled or not filled.startswith(b"HTTP/1.1")
    once = iter(range(3))  # of what is long, so that an answer is no file of its own
    said = re.sub(
        rb"\{(%b)\}" % known,
        lambda found: (
            words[found[1].decode()] if len(words[found[1].decode()]) < 99 or next(once, None) is not None else b""
        ),
        filled.replace(b"{end}", b""),
    )
    start, _, sent = said.partition(b"\r\n\r\n")
    framed = re.search(rb"(?i)\r\ntransfer-encoding: chunked(\r|$)", start)
    wanted = chunks if framed else whole if start.split()[1:2] == [b"200"] else body
    return said, sent == wanted or start.split()[1:2] not in ([b"200"], [b"206"]), ends


def make(root: Path) -> None:
    (root / FILE).write_text(RANGE)


@st.composite
def _answers(draw: st.DrawFn) -> str:
    found = [pick(draw, ANSWERS) for _ in range(draw(st.integers(1, 3)))]
    at = draw(st.integers(0, len(found) - 1))
    found[at] = draw(texts(found[at], WORDS, most=2))
    return BETWEEN.join([*found, *([RANGE] if draw(st.booleans()) else [])])


def cases(root: Path) -> SearchStrategy[Case]:
    return encoded(_answers()).map(lambda content: {FILE: content})


def read(root: Path) -> Read:
    server = Server((root / FILE).read_bytes().split(BETWEEN.encode()))
    asker = client(server)
    try:
        store = HttpStore(f"http://me:secret@server/{root.name}", asker)
        folder = RemotePath(RemoteTree(store))
        contents = {name: _whole(store, folder, name) for name in sorted(store.files)}
    finally:
        most = sum(server.asked.values()) * MAX_PAUSE
        assert asker.given_up.seconds <= most, "waits longer than it says"  # type: ignore[attr-defined]
        assert max(server.asked.values(), default=0) < 20 * MAX_FAILURES, "asks without end"
        assert not server.secrets, f"told the user's password to {server.secrets[:3]}"
    return Read(contents, server, asker.given_up.seconds)  # type: ignore[attr-defined]


def _whole(store: HttpStore, folder: RemotePath, name: str) -> bytes:
    """A file as readers read it: the header first, then weights from there on."""
    nbytes = store.files[name].nbytes
    if nbytes > 1 << 20:  # nothing here is so long: the server says so, and a reader finds it out at the end
        store.fetch(name, nbytes - 8, memoryview(bytearray(8)))
        raise AssertionError(f"read the last bytes of {name}, which has none at {nbytes}")
    out = bytearray(nbytes)
    head = (folder / name).handle().read_at(64, 0)
    out[: len(head)] = head
    for begin in range(len(head), nbytes, STEP):
        store.fetch(name, begin, memoryview(out)[begin : begin + STEP])
    return bytes(out)


def agree(root: Path, found: Read) -> None:
    for name, content in found.contents.items():
        whole = CONTENTS[name]
        assert found.server.lied or content == whole[: len(content)], (
            f"{name}: {len(content)} bytes that the server did not send of it"
        )


TARGET = Target("servers", make, cases, read, agree, FILE)
