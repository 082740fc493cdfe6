"""What attacks on manifests of batches and on servers' answers found, each as it was found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.core.errors import SourceError, UsageError
from bridge.core.remote.exchange import Address
from bridge.core.remote.http import HttpStore
from bridge.core.remote.path import RemoteTree
from bridge.core.remote.store import RemoteStat
from bridge.core.text import byte_count
from bridge.workflows.batch.manifest.read import read_manifest
from tests.fuzz.case import clean
from tests.fuzz.targets import listings
from tests.fuzz.wire import client

ROW = '[[row]]\nmodel = "m"\ntarget = "hf"\n'
HEAD = b"HTTP/1.1 206 Partial Content\r\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"workers = {'9' * 5000}\n{ROW}", "cannot be read as TOML"),
        (f"a{'.a' * 20_000} = 1\n{ROW}", "cannot be read as TOML"),
        (f"local = 3\n{ROW}", "write it as a table"),
        (f'memory = "{"9" * 400}GB"\n{ROW}', "is not a size"),
        (f'summary = "a\\u0000b"\n{ROW}', "control characters"),
        (f'summary = "~nobody-here/x"\n{ROW}', "no such user"),
        (f'{ROW}out = "~nobody-here/x"\n', "no such user"),
        (
            f'{ROW}name = "{"{model}" * 500}"\nquant = "{"q" * 3000}"\nout = "{"{name}" * 600}"\n',
            "is unknown|characters",
        ),
        (f'{ROW}out = "{"{name}" * 600}"\n', "at most 4096"),
        (f'{ROW}calib = "{"c" * 5000}"\n', "at most 4096 characters"),
        ('[[matrix]]\nmodel = ["m"]\ntarget = ["hf"]\nexclude = [' + '{kv = "a"},' * 101 + "]\n", "at most 100"),
    ],
)
def test_manifest_that_is_none_is_one_error(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "batch.toml").write_text(text)
    with pytest.raises(UsageError, match=why) as caught:
        read_manifest(tmp_path / "batch.toml")
    clean(caught.value, tmp_path)


def test_name_that_no_directory_can_have_is_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "batch.toml").write_text(ROW.replace('"m"', f'"{"m" * 300}"') + 'out = "o"\nname = "n"\n')
    assert read_manifest(tmp_path / "batch.toml").rows[0].model == "m" * 300


def test_size_of_too_many_digits_is_no_size() -> None:
    with pytest.raises(UsageError, match="is not a size"):
        byte_count("9" * 400)


def looked(*answers: bytes) -> RemoteStat | None:
    """What is found out of a file that a server answers so about."""
    said = iter(answers)
    asker = client(lambda request: (next(said, b""), True), tries=1)
    return asker.stat(Address("http://server/a", {}))


@pytest.mark.parametrize(
    "place",
    [b"http://a..b/", b"http://" + b"a" * 70 + b"/", b"ftp://h/x", b"http://[::1", b"http://h:0/", b"//h/?\xe9"],
)
def test_server_that_sends_on_to_no_address_is_one_error(place: bytes) -> None:
    with pytest.raises(SourceError, match="redirects to an address that is malformed"):
        looked(b"HTTP/1.1 302 Found\r\nLocation: " + place + b"\r\nContent-Length: 0\r\n\r\n")


def test_letters_of_the_address_that_a_server_sends_on_to_are_spelled_out() -> None:
    asked: list[bytes] = []

    def answer(request: bytes) -> tuple[bytes, bool]:
        asked.append(request.split(b" ")[1])
        onward = b"HTTP/1.1 302 Found\r\nLocation: /\xe9 b\r\nContent-Length: 0\r\n\r\n"
        return (onward if len(asked) == 1 else HEAD + b"Content-Range: bytes 0-1/2\r\n\r\nab"), True

    found = client(answer, tries=1).stat(Address("http://server/a", {}))
    assert found and found.head == b"ab"
    assert asked == [b"/a", b"/%C3%A9%20b"]


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Content-Range: bytes 5-6/2\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 416 No\r\nContent-Range: bytes */2\r\nContent-Length: 2\r\n\r\nno",
    ],
)
def test_body_that_is_another_range_is_not_taken_for_the_beginning(answer: bytes) -> None:
    with pytest.raises(SourceError, match="another range"):
        looked(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000,
        HEAD + b"Content-Range: bytes 0-1/2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 400_000,
    ],
)
def test_answer_without_end_is_left(answer: bytes) -> None:
    with pytest.raises(SourceError, match="LineTooLong"):
        looked(answer)


@pytest.mark.parametrize("nbytes", [-1, 1 << 63, "12", 1.5])
def test_size_that_no_file_has_is_one_error(nbytes: object) -> None:
    store = SimpleNamespace(where="s3://bucket/m", files={"a": RemoteStat(nbytes, "")})  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="s3://bucket/m/a: the server lists an invalid size"):
        RemoteTree(store)  # type: ignore[arg-type]


def test_what_a_store_lists_beside_the_directory_is_none_of_its_files(tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    listings.make(root)
    page = (root / listings.XML).read_text().replace("<Key>model/sub", "<Key>else/model/sub")
    (root / listings.XML).write_text(page)
    assert [*listings.read(root)[listings.XML]] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", [listings.XML, listings.GS, listings.HUB])
def test_a_part_of_a_listing_is_not_taken_for_all_of_it(tmp_path: Path, name: str) -> None:
    root = tmp_path / "model"
    root.mkdir()
    listings.make(root)
    found = listings.read(root)
    listings.agree(root, found)
    assert found[name].pop("sub/deep/b.bin")
    with pytest.raises(AssertionError):
        listings.agree(root, found)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sha": None}, "hf://org/model: the hub names no commit of it"),
        ({"sha": 7}, "hf://org/model: the hub names no commit of it"),
        ({"siblings": [{"rfilename": "", "size": 3}]}, "hf://org/model: files are named ''"),
    ],
)
def test_hub_that_tells_of_no_commit_or_a_file_without_a_name_is_one_error(
    tmp_path: Path, change: dict[str, object], why: str
) -> None:
    root = tmp_path / "model"
    root.mkdir()
    listings.make(root)
    (root / listings.HUB).write_text(json.dumps(json.loads((root / listings.HUB).read_text()) | change))
    with pytest.raises(SourceError, match=why):
        listings.read(root)


@pytest.mark.parametrize("line", [b"no header", b"Transfer-Encoding: \0chunked", b"Transfer-Encoding: gzip"])
def test_head_that_hides_how_its_body_is_coded_is_refused(line: bytes) -> None:
    head = HEAD + b"Content-Range: bytes 0-1/2\r\n" + line + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(SourceError, match="malformed"):  # chunks became content
        looked(head + b"2\r\nab\r\n0\r\n\r\n")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "bridge.json"])
def test_of_an_empty_file_no_range_is_asked_for(name: str) -> None:
    asked: list[bytes] = []

    def answer(request: bytes) -> tuple[bytes, bool]:
        asked.append(request)
        head = request.partition(b" HTTP")[0]
        if head.endswith(f"/{name}".encode()):
            return b"HTTP/1.1 416 No\r\nContent-Range: bytes */0\r\nContent-Length: 0\r\n\r\n", False
        return b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", False

    assert name in HttpStore("http://server/m", client(answer)).files
    assert asked and all(b"\r\nRange: bytes=0-65535\r\n" in request for request in asked)


def test_a_user_in_the_address_that_a_server_sends_on_to_reaches_no_header() -> None:
    asked: list[bytes] = []

    def answer(request: bytes) -> tuple[bytes, bool]:
        asked.append(request)
        onward = b"HTTP/1.1 302 Found\r\nLocation: http://user:secret@h/x\r\nContent-Length: 0\r\n\r\n"
        return (onward if len(asked) == 1 else HEAD + b"Content-Range: bytes 0-1/2\r\n\r\nab"), True

    assert client(answer, tries=1).stat(Address("http://server/a", {}))
    assert b"\r\nHost: h\r\n" in asked[1] and b"secret" not in asked[1]
