"""A remote directory answers as a local one does, and its addresses show nothing secret."""

from __future__ import annotations

import tarfile
import threading
from pathlib import Path

import pytest

import bridge
from bridge.core.addresses import checked, is_remote, server_of, shown
from bridge.core.errors import SourceError, UsageError
from bridge.core.remote.path import RemotePath, RemoteTree
from bridge.core.remote.store import RemoteStat

NAMES = (
    "config.json", "model-1.safetensors", "model-2.safetensors", ".metadata", "context/model.yaml",
    "iter_0000100/common.pt", "iter_0000100/.metadata", "step-3/.metadata", "mp_rank_00/model_optim_rng.pt",
)  # fmt: skip


class Kept:
    """A store whose files lie here."""

    given_up = threading.Event()

    def __init__(self, root: Path) -> None:
        self.where, self._root = "s3://bucket/m", root
        paths = [path for path in root.rglob("*") if path.is_file()]
        self.files = {path.relative_to(root).as_posix(): RemoteStat(path.stat().st_size, "1") for path in paths}

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        out[:] = (self._root / name).read_bytes()[begin : begin + len(out)]


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, RemotePath]:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 9000)
    return tmp_path, RemotePath(RemoteTree(Kept(tmp_path)))


@pytest.mark.parametrize(
    "pattern",
    ["*", "*.json", "model*.safetensors", ".metadata", "iter_[0-9]*/", "step-[0-9]*/.metadata", "mp_rank_*/",
     "context/model.yaml", "nothing*", "*/.metadata"],
)  # fmt: skip
def test_patterns_match_what_they_match_here(pattern: str, both: tuple[Path, RemotePath]) -> None:
    near, far = both
    wanted = {path.relative_to(near).as_posix() for path in near.glob(pattern)}
    if pattern.endswith("/"):  # Python 3.11 did not tell directories
        wanted = {name for name in wanted if (near / name).is_dir()}
    assert {path.relative_to(far).as_posix() for path in far.glob(pattern)} == wanted


def test_no_name_is_the_directory_itself(both: tuple[Path, RemotePath]) -> None:
    assert [path.name for path in (both[1] / "").glob("*")] == [path.name for path in both[1].glob("*")] != []


def test_names_kinds_and_sizes_are_those_of_a_local_directory(both: tuple[Path, RemotePath]) -> None:
    near, far = both
    for name in (*NAMES, "context", "iter_0000100", "none", "config"):
        here, there = near / name, far / name
        assert (there.is_file(), there.is_dir(), there.exists()) == (here.is_file(), here.is_dir(), here.exists())
        assert (there.name, there.stem, there.parent.name) == (here.name, here.stem, (near / name).parent.name) or (
            here.parent == near
        )
        if here.is_file():
            assert there.stat().st_size == here.stat().st_size and there.read_bytes() == here.read_bytes()
    assert {path.name for path in far.iterdir()} == {path.name for path in near.iterdir()}
    assert str(far / "a" / "b") == "s3://bucket/m/a/b" and (far / "a").parent == far


def test_a_stream_seeks_and_reads_as_a_file_does(both: tuple[Path, RemotePath]) -> None:
    near, far = both
    with (near / NAMES[1]).open("rb") as here, (far / NAMES[1]).open() as there:
        for at in (0, 70_000, 5, 170_000):
            assert here.seek(at) == there.seek(at)
            assert here.read(1000) == there.read(1000)
        assert here.read() == there.read()


def test_an_archive_is_listed_without_reading_what_lies_in_it(tmp_path: Path) -> None:
    big = tmp_path / "big.bin"
    big.write_bytes(bytes(5 << 20))
    with tarfile.open(tmp_path / "m.nemo", "w:") as tar:
        tar.add(big, "big.bin")
        tar.add(big, "other.bin")
    store = Kept(tmp_path)
    asked: list[int] = []
    fetch = store.fetch
    store.fetch = lambda name, begin, out: (asked.append(len(out)), fetch(name, begin, out))[1]  # type: ignore[method-assign]
    with (RemotePath(RemoteTree(store)) / "m.nemo").open() as file, tarfile.open(fileobj=file, mode="r:") as tar:
        assert [member.size for member in tar.getmembers()] == [5 << 20, 5 << 20]
    assert sum(asked) < 1 << 20


def test_a_missing_file_is_an_os_error_as_it_is_here(both: tuple[Path, RemotePath]) -> None:
    with pytest.raises(FileNotFoundError):
        (both[1] / "none").read_bytes()


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("https://me:secret@host:8443/a/b/?sig=secret#x", "https://host:8443/a/b"),
        ("s3://bucket/a/", "s3://bucket/a"),
        ("hf://org/name@v1/sub", "hf://org/name@v1/sub"),
        ("HTTPS://me:secret@host/a", "https://host/a"),
        ("https://me:sec/ret@host/a", "https://..."),
        ("https://me:sec?ret@host/a", "https://..."),
        ("https://[bad/a?sig=secret", "https://[bad/a"),
        ("s3://", "s3://"),
    ],
)
def test_addresses_are_shown_without_secrets(url: str, wanted: str) -> None:
    assert shown(url) == wanted


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("https://me:key@Host:81/a?sig=1", "https://host:81"), ("HTTPS://host/b", "https://host"),
        ("s3a://Bucket/a", "s3://Bucket"), ("s3://Bucket/a", "s3://Bucket"), ("s3://other/a", "s3://other"),
        ("gcs://b/a", "gs://b"), ("hf://org/name@v1", "hf://"), ("org/name", ""), ("/a/b", ""),
        ("https://me:a/b@one/c", ""), ("https://me:a/b@two/c", ""), ("s3://", ""),
    ],
)  # fmt: skip
def test_one_server_has_one_name_and_what_none_can_be_told_of_has_none(url: str, wanted: str) -> None:
    assert server_of(url) == wanted


@pytest.mark.parametrize("model", ["org/name", "org/name@v1", "C:/models", "/a/b", Path("s3://b"), None, 3])
def test_paths_and_hub_ids_are_no_addresses(model: object) -> None:
    assert not is_remote(model)


def test_an_address_in_capitals_is_one_too() -> None:
    assert is_remote("HTTPS://host/a") and checked("S3://Bucket/A b") == "s3://Bucket/A b"


def test_letters_that_servers_do_not_take_are_spelled_as_they_do() -> None:
    assert (
        checked("HTTPS://me:s%2F@bücher.de:81/a b/ü?x=%20") == "https://me:s%2F@xn--bcher-kva.de:81/a%20b/%C3%BC?x=%20"
    )


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://[bad/x", "Invalid IPv6 URL"),
        ("https://host:abc/x", "Port could not be cast to integer value"),
        ("https://host:99999/x", "Port out of range 0-65535"),
        ("https://ho st/x", "the name of the server is missing or malformed"),
        (f"https://{'a' * 64}.com/x", "the name of the server is missing or malformed"),
        ("https:///x", "the name of the server is missing or malformed"),
        ("s3://", "nothing follows ://"),
        ("https://me:sec/ret@host/x", "Port could not be cast to integer value"),
    ],
)
def test_what_is_no_address_is_said_at_once(url: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        bridge.plan(url, "hf")
    assert f"{shown(url)}: not an address ({why}); write scheme://server/directory" in str(caught.value)
    assert "ret" not in str(caught.value)


class Named:
    """A store with files of these names, which nobody reads."""

    where, given_up = "s3://bucket/m", threading.Event()

    def __init__(self, *names: str, tag: str = "1") -> None:
        self.files = {name: RemoteStat(1, tag) for name in names}

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        raise AssertionError(name)


@pytest.mark.parametrize("name", ["../../escaped.txt", "/etc/x", "a//b", "./x", "a/../b", "a/", "", "a\\..\\b", "a\0"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(SourceError, match=r"s3://bucket/m: files are named .*; a name must not hold"):
        RemoteTree(Named("config.json", name))


@pytest.mark.parametrize(("tag", "same"), [("1", True), ("", False)])
def test_what_has_no_tag_is_not_known_again(tag: str, same: bool) -> None:
    """A run that goes on where a killed one stopped compares these."""
    first, second = (RemotePath(RemoteTree(Named("a", tag=tag))) / "a" for _ in range(2))
    assert (first.stat() == second.stat()) is same and first.stat() == first.stat()
