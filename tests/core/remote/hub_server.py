"""A stand-in for the hub's HTTP API in this process: repositories, commits, large files by digest, users and rights.

What it takes and says follows huggingface_hub's own requests (`_commit_api.py`, `lfs.py`, `hf_api.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.core.remote.server import Quiet

ATTRIBUTES = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
TOKEN = "hf_writer"


def user(name: str, role: str = "write", **orgs: str) -> dict[str, Any]:
    """What the hub says of a user: the role of the token, and the user's role in each organization."""
    mine = [{"type": "org", "name": org, "roleInOrg": of} for org, of in orgs.items()]
    token = {"displayName": "a token", "role": role}
    return {"type": "user", "name": name, "orgs": mine, "auth": {"type": "access_token", "accessToken": token}}


@dataclass
class Repo:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=lambda: dict(ATTRIBUTES))
    commits: list[str] = field(default_factory=lambda: ["first commit"])

    @property
    def sha(self) -> str:
        return hashlib.sha1("\0".join(self.commits).encode()).hexdigest()


@dataclass
class Hub:
    """What the hub has, what it was asked, and what goes wrong with it."""

    users: dict[str, dict[str, Any]]
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)  # digests of large files, as they arrive
    fails: dict[str, list[int]] = field(default_factory=dict)  # a pattern of requests -> statuses of the next of them
    lost: list[str] = field(default_factory=list)  # patterns of requests that are done, and their answer is lost
    stalls: str = ""  # a pattern of requests that are not answered
    stalled: threading.Event = field(default_factory=threading.Event)
    renamed: dict[str, str] = field(default_factory=dict)

    def may_write(self, token: str, repo: str) -> bool:
        who, owner = self.users.get(token), repo.partition("/")[0]
        orgs = [org["name"] for org in who["orgs"] if org["roleInOrg"] != "read"] if who else []
        return who is not None and who["auth"]["accessToken"]["role"] != "read" and owner in (who["name"], *orgs)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    address: str

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def answer(self) -> None:
        path, hub = unquote(urlsplit(self.path).path), self.hub
        self.headers_said: dict[str, str] = {}
        request = f"{self.command} {path}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = self.chunks()
        hub.asked.append(request)
        if hub.stalls and re.search(hub.stalls, request):
            hub.stalled.set()
            threading.Event().wait()
        for pattern, statuses in hub.fails.items():
            if statuses and re.search(pattern, request):
                return self.say(statuses.pop(0), {"error": "out of order"})
        status, content = self.done(path, body)
        if any(re.search(pattern, request) for pattern in hub.lost):
            self.close_connection = True
            return self.connection.close()
        return self.say(status, content)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def say(self, status: int, content: dict[str, Any] | bytes) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), **self.headers_said}
        if status == 404:
            headers["X-Error-Code"] = "RepoNotFound"
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def done(self, path: str, body: bytes) -> tuple[int, dict[str, Any] | bytes]:
        """The status and the content of an answer."""
        hub = self.hub
        if path.startswith("/objects/"):
            oid = path.rpartition("/")[2]
            if hashlib.sha256(body).hexdigest() != oid:
                return 400, {"error": "another digest"}
            hub.sent.append(oid)
            hub.objects[oid] = body
            return 200, {}
        if self.token and self.token not in hub.users:
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, hub.users[self.token]
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            wrong = re.search(r"^base_model: (/.*)$", json.loads(body)["content"], re.M)
            said = [{"message": f'"base_model" with value "{wrong[1]}" is not valid.'}] if wrong else []
            return (400 if wrong else 200), {"errors": said, "warnings": []}
        name = re.match(r"/(?:api/models/)?([^/]+/[^/]+?)(\.git)?(/.*)?$", path)
        assert name, path
        repo, rest = hub.repos.get(hub.renamed.get(name[1], name[1])), name[3] or ""
        if repo is None or (repo.private and not hub.may_write(self.token, name[1])):
            return 404, {"error": "Repository not found"}
        if rest in ("", "/revision/main", f"/revision/{repo.sha}"):
            files = [self.listed(name, content) for name, content in repo.files.items()]
            named = hub.renamed.get(name[1], name[1])
            return 200, {"id": named, "sha": repo.sha, "private": repo.private, "siblings": files, "tags": []}
        if rest.startswith("/resolve/"):
            content = repo.files[rest.split("/", 3)[3]]
            self.headers_said = {"X-Repo-Commit": repo.sha, "ETag": f'"{git_digest(content)}"'}
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                begin, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
                self.headers_said["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
                return 206, content[begin:end]
            return 200, content
        if not hub.may_write(self.token, name[1]):
            return 403, {"error": "You have read access but not the required permissions for this operation"}
        return self.change(name[1], rest, body)

    def create(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = f"{asked['organization']}/{asked['name']}"
        if not self.hub.may_write(self.token, name):
            return 403, {"error": f"You don't have the rights to create a model under {asked['organization']}"}
        if name in self.hub.repos:
            return 409, {"error": "You already created this model repo"}
        self.hub.repos[name] = Repo(asked.get("visibility") == "private" or asked.get("private") is True)
        return 200, {"url": f"{self.address}/{name}"}

    @staticmethod
    def listed(name: str, content: bytes) -> dict[str, Any]:
        row: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_digest(content)}
        if name.endswith(".safetensors"):
            row["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return row

    def change(self, name: str, rest: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """What only who may write asks for."""
        hub, repo = self.hub, self.hub.repos[name]
        if rest == "/auth-check/write":
            return 200, {}
        if rest == "/preupload/main":
            ignored = repo.files.get(".gitignore", b"").decode().split()
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": file["path"] in ignored,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if rest == "/info/lfs/objects/batch":
            rows: list[dict[str, Any]] = []
            for row in json.loads(body)["objects"]:
                upload = {"upload": {"href": f"{self.address}/objects/{row['oid']}"}}
                rows.append(row if row["oid"] in hub.objects else {**row, "actions": upload})
            return 200, {"transfer": "basic", "objects": rows}
        assert rest == "/commit/main", rest
        head, *lines = map(json.loads, body.splitlines())
        if head["value"].get("parentCommit", repo.sha) != repo.sha:
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        files = dict(repo.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            else:
                assert line["key"] == "deletedFile", line
                del files[value["path"]]
        repo.files = files
        repo.commits.append(head["value"]["summary"])
        url = f"{self.address}/{name}/commit/{repo.sha}"
        return 200, {"commitUrl": url, "commitOid": repo.sha}


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serving_hub() -> Iterator[tuple[str, Hub]]:
    """The address of a hub that has no repository, and its state, which may be changed meanwhile."""
    hub = Hub({TOKEN: user("me", org="write", shop="read"), "hf_reader": user("me", "read")})
    server = Quiet(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.RequestHandlerClass.address = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hub
    finally:
        server.shutdown()
        server.server_close()
